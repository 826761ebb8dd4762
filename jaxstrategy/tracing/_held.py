"""Objects of Flax NNX that a step reads without being given them, nor by its own names.

It reaches them through something else, as a method does in `self.model(x)`. Their
arrays are constants of its program. So the program is only right as long as they are
what they were, and that is looked at before each of its calls.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxstrategy import _source, _values
from jaxstrategy._errors import RecompilationWarning
from jaxstrategy.tracing._binding import is_variable, structure_of


class Held:
    """The objects whose arrays are constants of a program.

    Args:
      name: how messages call the step.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._variables: list[tuple[Any, Any]] = []
        self._owners: list[tuple[weakref.ref[Any], Any]] = []
        self._times = 0

    def __bool__(self) -> bool:
        return bool(self._variables)

    def add(self, jaxpr: Any) -> None:
        """Take note of the constants of a traced step."""
        arrays = {id(array) for array in _constants(jaxpr)}
        if not arrays or not _values.object_kinds():
            return
        variables, objects = _alive()
        found = [v for v in variables if id(v.get_raw_value()) in arrays]
        self._variables += ((v, v.get_raw_value()) for v in found)
        self._owners += (
            (weakref.ref(each), structure_of(each)) for each in _owners(found, objects)
        )

    def have_changed(self) -> bool:
        """Whether a constant is not what its object has now; forgets them if so."""
        arrays = all(v.get_raw_value() is array for v, array in self._variables)
        if arrays and all(map(_is_as_it_was, self._owners)):
            return False
        self._variables, self._owners = [], []
        self._times += 1
        # Once can also mean that a constant came from a copy of what has changed.
        if self._times == 2:
            _source.warn(
                f"`{self._name}` is compiled again because an object of Flax NNX has "
                "changed that it uses but was not given: an attribute, or an entry of "
                "a container. Its arrays are constants of the compiled program. Pass "
                "it as an argument.",
                RecompilationWarning,
            )
        return True


def _is_as_it_was(known: tuple[weakref.ref[Any], Any]) -> bool:
    owner = known[0]()
    return owner is None or structure_of(owner) == known[1]


def _constants(jaxpr: Any) -> Iterator[jax.Array]:
    """The arrays that `jaxpr` has captured, at any depth."""
    for value in getattr(jaxpr, "consts", ()):
        if isinstance(value, jax.Array):
            yield value
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for atom in eqn.invars:
            if isinstance(atom, core.Literal) and isinstance(atom.val, jax.Array):
                yield atom.val
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _constants(inner)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.Jaxpr) or hasattr(value, "consts")


def _alive() -> tuple[list[Any], list[Any]]:
    """All variables that there are, and all other objects of Flax NNX."""
    # Where a constant came from can be known in no other way: attributes, containers,
    # generators lead to it, or a function in C.
    variables, objects, kinds = [], [], _values.object_kinds()
    for each in gc.get_objects():
        # By type: to `isinstance` some libraries' objects warn, or load a library.
        if is_variable(each):
            variables.append(each)
        elif issubclass(type(each), kinds):
            objects.append(each)
    return variables, objects


def _owners(variables: Sequence[Any], objects: Sequence[Any]) -> list[Any]:
    """The objects that have some of `variables`, and are no part of another one."""
    if not variables:
        return []
    iter_graph = sys.modules["flax.nnx"].iter_graph
    wanted, owners, parts = set(map(id, variables)), [], set()
    for each in objects:
        nodes = [node for _, node in iter_graph(each)]
        if any(id(node) in wanted for node in nodes):
            owners.append(each)
            parts |= {id(node) for node in nodes if node is not each}
    return [each for each in owners if id(each) not in parts]
