"""Which parts of a program stay TensorFlow: `KeptCode`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

import libcst as cst

from jaxstrategy.compat.port._canonical import canonical
from jaxstrategy.compat.port._finding import Finding, found
from jaxstrategy.compat.port._name import Name
from jaxstrategy.compat.port._python_program import root
from jaxstrategy.compat.port._uses import Uses

_PIPELINES = frozenset(
    "map filter flat_map interleave apply take_while group_by_window scan "
    "map_and_batch parallel_interleave".split()
)
_TEXT = "stays TensorFlow, as a dataset of tf.data runs it"


@final
class KeptCode:
    """Code that datasets of tf.data run, and methods of Keras classes.

    Functions of arrays are not renamed in it: they are given TensorFlow's tensors.

    Args:
      uses: what the program uses.
      row: the row of each name, with its modules.
      keras: whether classes of Keras become those of Keras 3 on JAX.
    """

    def __init__(self, uses: Uses, row: Callable[[str], Name], keras: bool) -> None:
        self._uses, self._program, self._row = uses, uses.program, row
        self._spans: list[tuple[int, int]] = []
        self._types: list[tuple[int, int]] = []
        self.findings: list[Finding] = []
        names: set[str] = set()
        for call in uses.calls:
            names |= self._of_call(call)
        for each in () if keras else uses.classes:
            if any(self._is(base.value, "tf.keras") for base in each.bases):
                self._spans.append(self._program.span(each.body))
        self._add_functions(names)

    def holds(self, node: cst.CSTNode) -> bool:
        """Whether a name stands in such code."""
        return _within(self._program.span(node), self._spans)

    def holds_type(self, node: cst.CSTNode) -> bool:
        """Whether a type is an argument of a function that stays TensorFlow's."""
        return _within(self._program.span(node), self._types)

    def _of_call(self, call: cst.Call) -> set[str]:
        """Keeps what a call's arguments are; names of functions that it is given."""
        if self._is_pipeline(call):
            return set().union(*map(self._given, call.args))
        if self._of_tensorflow(call.func) and not self._has_name(call.func):
            self._types += [self._program.span(arg) for arg in call.args]
        return set()

    def _is_pipeline(self, call: cst.Call) -> bool:
        """Whether it makes a dataset, or is a method of one."""
        if self._is(_innermost(call.func), "tf.data", "tf.contrib.data"):
            return True
        if not isinstance(call.func, cst.Attribute) or self._of_tensorflow(call.func):
            return False
        base = root(call.func)
        of_jax = base is not None and any(
            name.split(".")[0] in ("jax", "jaxstrategy", "functools", "pandas", "numpy")
            for name in self._program.meanings(base)
        )
        return call.func.attr.value in _PIPELINES and not of_jax

    def _given(self, arg: cst.Arg) -> set[str]:
        if isinstance(arg.value, cst.Name):
            return {arg.value.value}
        self._spans.append(self._program.span(arg))
        self._types.append(self._program.span(arg))
        return _called(arg.value)

    def _add_functions(self, names: set[str]) -> None:
        """Keeps the functions of these names, and those that they call."""
        done: set[str] = set()
        while names - done:
            name = min(names - done)
            done.add(name)
            for function in self._uses.functions.get(name, ()):
                self._spans.append(self._program.span(function))
                place = self._program.place(function)
                self.findings.append(found(f"def {name}", _TEXT, place, False))
                names = names | _called(function.body)

    def _of_tensorflow(self, node: cst.BaseExpression) -> bool:
        return self._is(_innermost(node), "tf")

    def _has_name(self, node: cst.BaseExpression) -> bool:
        names = self._program.meanings(node) if root(node) else []
        return any(self._row(name).new is not None for name in names)

    def _is(self, node: cst.BaseExpression, *modules: str) -> bool:
        if root(node) is None:
            return False
        return any(
            f"{canonical(name)}.".startswith(f"{module}.")
            for name in self._program.meanings(node)
            if name.split(".")[0] in ("tensorflow", "tensorflow_core")
            for module in modules
        )


def _innermost(node: cst.BaseExpression) -> cst.BaseExpression:
    """`a.b` of `a.b(...).c(...).d`: what a chain of calls begins with."""
    while root(node) is None and isinstance(node, cst.Attribute | cst.Call):
        inner = node.func if isinstance(node, cst.Call) else node.value
        node = inner
    return node


def _called(node: cst.CSTNode) -> set[str]:
    """The names of functions that code calls."""
    return set(_calls(node))


def _calls(node: cst.CSTNode) -> Iterator[str]:
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
        yield node.func.value
    for child in node.children:
        yield from _calls(child)


def _within(span: tuple[int, int], spans: list[tuple[int, int]]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in spans)
