"""What is said of compilations: too many of a function, or one that may not be."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Sequence

import jax
import numpy as np

from jaxstrategy._src import text
from jaxstrategy._src.errors import CompiledStepError, RecompilationWarning
from jaxstrategy._src.text import array_type, shown
from jaxstrategy._src.tracing import nnx
from jaxstrategy._src.tracing.jaxprs import ArrayType
from jaxstrategy._src.tracing.references import References, code_of
from jaxstrategy._src.tracing.signature import Signature
from jaxstrategy._src.tracing.traced_step import name_of
from jaxstrategy._src.values.arrays import Function, Leaf, TreeStructure

# Warns when a function is compiled again and again, and says what changed.
#
# Compilations are counted by code: a lambda inside a loop is a new function at each
# turn, with the same code. A program that was called `WORTH` times does not count. If a
# function captures another number or array each time, the warning comes early, as there
# may be no end to those; of functions, strings and bools there are only a few.

# Compilations of one function without a warning: a few batch shapes, training and
# evaluation.
QUIET = 5
WORTH = 10
# The same for a function that captures other data each time.
QUIET_DATA = 2

_CHOICES = (bool, str, bytes, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class Calls:
    """The number of calls of functions with one cache key, and what they capture."""

    def __init__(self, references: References) -> None:
        self.count = 0
        self._opaque = references.opaque
        self._tokens, nodes = references.key, references.nodes
        self._labels = [node.label for node in nodes]
        self._kinds = [type(node.value) for node in nodes]
        self._texts = [_described(node.value) for node in nodes]

    def difference(self, other: Calls) -> tuple[str, bool]:
        """Describes the difference from `other`; and whether it is data."""
        if (opaque := other._opaque) is not None:
            known = dict(zip(other._labels, other._texts, strict=True))
            text = known.get(opaque, "more than can be looked through")
            return (
                f"it is a new function object each time and uses `{opaque}`, {text}, "
                "of which Python does not say whether it has changed. Define the "
                "function once, outside, or pass what changes as an argument."
            ), True
        for i, (was, now) in enumerate(zip(self._tokens, other._tokens, strict=False)):
            if was != now and "__defaults__" not in other._labels[i]:
                label, old, new = other._labels[i], self._texts[i], other._texts[i]
                changed = f"it was {old}, is {new}" if old != new else f"it is {new}"
                return (
                    f"it is a new function object each time, and `{label}` changed: "
                    f"{changed}. Pass it as an argument."
                ), not issubclass(other._kinds[i], (*_CHOICES, *_FUNCTIONS, type))
        return (
            "it is a new function object each time, made anew in a loop or function. "
            "Define it once, outside, and pass what changes as an argument."
        ), False


def _described(value: Leaf) -> str:
    kind = type(value)
    if kind in (*_CHOICES, int, float, complex) or issubclass(
        kind, (*_FUNCTIONS, type)
    ):
        return shown(value)
    if issubclass(kind, (jax.Array, np.ndarray)):
        return f"another {array_type(value.dtype, value.shape)}"
    return f"a {kind.__name__}"


class History:
    """The compilations of one function's code."""

    def __init__(self, quiet: bool = False) -> None:
        self.warned: set[type[Warning]] = set()
        self._quiet = quiet
        self._count = 0
        self._count_of_data = 0
        self._has_warned = False
        self._calls_before = 0
        self._last: tuple[Calls, Signature, Sequence[ArrayType]] | None = None

    def record(
        self,
        fn: Function,
        calls: Calls,
        signature: Signature,
        avals: Sequence[ArrayType],
    ) -> None:
        """Counts a compilation; warns once when there have been too many."""
        last, self._last = self._last, (calls, signature, list(avals))
        if last is not None and last[0].count - self._calls_before >= WORTH:
            self._count = self._count_of_data = 0
            self._has_warned = False
        self._calls_before = calls.count - 1
        self._count += 1
        if self._quiet or last is None:
            return
        what, is_data = None, False
        if last[0] is not calls:
            what, is_data = last[0].difference(calls)
        self._count_of_data += is_data
        is_early = is_data and self._count_of_data >= QUIET_DATA
        if not self._has_warned and (is_early or self._count > QUIET):
            self._has_warned = True
            name = getattr(fn, "__qualname__", type(fn).__name__)
            number = "3rd" if self._count == 3 else f"{self._count}th"
            what = what or _change(fn, *last[1:], signature, avals)
            text.warn(
                f"`{name}` is being compiled for the {number} time, because {what}",
                RecompilationWarning,
            )


def history_of(fn: Function, known: dict[int, History]) -> History:
    """The history of the code of `fn`; `known` is by the `id` of code."""
    code = code_of(fn)
    if code is None:  # a callable object: its own history
        return History()
    if not text.is_users(code.co_filename):
        return History(quiet=True)
    # By `id`: the code of a notebook cell that is run again is equal, but another one.
    if id(code) not in known:
        weakref.finalize(code, known.pop, id(code), None)
    return known.setdefault(id(code), History())


def _change(
    fn: Function,
    old: Signature,
    old_avals: Sequence[ArrayType],
    new: Signature,
    new_avals: Sequence[ArrayType],
) -> str:
    """Describes the difference between the arguments of two compilations."""
    if _is_rearranged(old, new):
        return (
            "the structure of its arguments changed: it was "
            f"{shown(old.treedef)}, is {shown(new.treedef)}. Pass the same "
            "containers with the same keys each time."
        )
    if (changed := old.difference(fn, new)) is not None:
        label, was, now = changed
        return (
            f"the static argument {label} changed: it was {was}, is {now}. Pass it as "
            "a number or an array, which are traced, if the function does not need its "
            "value in Python."
        )
    for index, (was, now) in enumerate(zip(old_avals, new_avals, strict=True)):
        if was != now:
            where = new.labels(fn)[new.dynamic[index]]
            return (
                f"the shape or dtype of {where} changed: it was {was.str_short()}, is "
                f"{now.str_short()}. Pad batches to one shape, or drop the last one."
            )
    if old.treedef != new.treedef:
        return (
            "something static in its objects of Flax NNX changed, such as an "
            "attribute. Keep what changes in an `nnx.Variable`."
        )
    return "its programs were forgotten or its context changed."


def _is_rearranged(old: Signature, new: Signature) -> bool:
    """Whether the structures differ, in more than what objects of Flax NNX hold."""
    if str(old.treedef) != str(new.treedef):
        return True
    has_objects = nnx.has_arrays(new.rebuild([0] * len(new.dynamic)))
    return old.treedef != new.treedef and not has_objects


def other_arguments(fn: Function, old: Signature, new: Signature) -> CompiledStepError:
    """The error for a call of a step that was compiled ahead for other arguments."""
    return CompiledStepError(
        f"`{name_of(fn)}` was compiled ahead of time for other arguments: "
        f"{_difference(fn, old, new)}. Call it with arguments like those it was "
        "compiled for, or compile it for these."
    )


def _difference(fn: Function, old: Signature, new: Signature) -> str:
    """The difference between two signatures, in words."""
    if _is_rearranged(old, new):
        if _paths(old.treedef) != _paths(new.treedef):
            was, now = shown(old.treedef), shown(new.treedef)
            return f"their structure was {was}, and is {now}"
        return (
            "their structure holds other static data, such as functions or settings of "
            "a `TrainState`. A model or an optimizer that is made anew is another one: "
            "make it once, outside of the function that builds the state"
        )
    if (changed := old.difference(fn, new)) is not None:
        label, was, now = changed
        return f"{label} was {was}, and is {now}"
    return (
        "something static in them, as an argument or an attribute of an object, has "
        "another value, or is equal to what it was and not the same"
    )


def _paths(structure: TreeStructure) -> list[str]:
    tree = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
