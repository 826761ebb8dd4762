"""Notices that one function is compiled again and again, and says what changed.

What counts is the function's code: a lambda written inside a loop is a new function at
each turn, and always the same code. A program that was called `WORTH` times was worth
compiling, and does not count.

A function that captures another number or array each time is told of soon: there is no
end to those. Other functions, strings and bools that it captures are choices of a few.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxstrategy._src.errors import RecompilationWarning
from jaxstrategy._src.text import user_code
from jaxstrategy._src.text.shown import array_type
from jaxstrategy._src.tracing.functions.code import code_of
from jaxstrategy._src.tracing.functions.references import References
from jaxstrategy._src.tracing.jaxprs.visit import ArrayType
from jaxstrategy._src.tracing.roles import Role, Signature
from jaxstrategy._src.values.arrays import Function, Leaf
from jaxstrategy._src.values.per_replica import Handle

# Compilations of one function that nobody needs to hear about: a few batch shapes,
# training and evaluation.
QUIET = 5
WORTH = 10
# Of one that captures other data each time.
QUIET_DATA = 2

_CHOICES = (bool, str, bytes, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class Calls:
    """The number of calls of functions with one key, and what these refer to."""

    def __init__(self, references: References | None) -> None:
        self.count = 0
        self._opaque = None if references is None else references.opaque
        self._tokens = () if references is None else references.form
        reached = () if references is None else references.reached
        self._labels = [step.label for step in reached]
        self._kinds = [type(step.value) for step in reached]
        self._texts = [_told(step.value) for step in reached]

    def difference(self, other: Calls) -> tuple[str, bool]:
        """The difference from `other` in words, and whether it is data."""
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


def _told(value: Leaf) -> str:
    kind = type(value)
    if kind in (*_CHOICES, int, float, complex) or issubclass(
        kind, (*_FUNCTIONS, type)
    ):
        return _shown(value)
    if issubclass(kind, (jax.Array, np.ndarray)):
        return f"another {array_type(value.dtype, value.shape)}"
    return f"a {kind.__name__}"


class History:
    """The compilations of one function's code."""

    def __init__(self, quiet: bool = False) -> None:
        self.told: set[type[Warning]] = set()
        self._quiet = quiet
        self._count = 0
        self._count_of_data = 0
        self._was_told = False
        self._calls_before = 0
        self._last: tuple[Calls, Signature, Sequence[ArrayType]] | None = None

    def record(
        self,
        fn: Function,
        calls: Calls,
        signature: Signature,
        avals: Sequence[ArrayType],
    ) -> None:
        """Note a compilation; warn once when there have been too many."""
        last, self._last = self._last, (calls, signature, list(avals))
        if last is not None and last[0].count - self._calls_before >= WORTH:
            self._count = self._count_of_data = 0
            self._was_told = False
        self._calls_before = calls.count - 1
        self._count += 1
        if self._quiet or last is None:
            return
        what, is_data = None, False
        if last[0] is not calls:
            what, is_data = last[0].difference(calls)
        self._count_of_data += is_data
        soon = is_data and self._count_of_data >= QUIET_DATA
        if not self._was_told and (soon or self._count > QUIET):
            self._was_told = True
            name = getattr(fn, "__qualname__", type(fn).__name__)
            number = "3rd" if self._count == 3 else f"{self._count}th"
            what = what or _difference(fn, *last[1:], signature, avals)
            user_code.warn(
                f"`{name}` is being compiled for the {number} time, because {what}",
                RecompilationWarning,
            )


def history_of(fn: Function, known: dict[int, History]) -> History:
    """The history of the code of `fn`, among those that are known."""
    code = code_of(fn)
    if code is None:  # a callable object: only its own past counts
        return History()
    if not user_code.is_users(code.co_filename):
        return History(quiet=True)
    # By identity: the code of a notebook cell that is run again is equal, not the same.
    if id(code) not in known:
        weakref.finalize(code, known.pop, id(code), None)
    return known.setdefault(id(code), History())


def _difference(
    fn: Function,
    old: Signature,
    old_avals: Sequence[ArrayType],
    new: Signature,
    new_avals: Sequence[ArrayType],
) -> str:
    """The difference between the arguments of two compilations, in words."""
    if old.treedef != new.treedef:
        return (
            "the structure of its arguments changed: it was "
            f"{_shown(old.treedef)}, is {_shown(new.treedef)}. Pass the same "
            "containers with the same keys each time."
        )
    pairs = zip(_roles(old), _roles(new), strict=True) if old != new else ()
    for index, (a, b) in enumerate(pairs):
        # By value, a variable would be read here, where JAX traces.
        has_handle = isinstance(a[-1], Handle) or isinstance(b[-1], Handle)
        if a[-1] is not b[-1] if has_handle else a != b:
            was, now = (
                _shown(static[1]) if static else f"an array or number ({role.value})"
                for role, *static in (a, b)
            )
            return (
                f"the static argument {new.label(fn, index)} changed: it was {was}, is "
                f"{now}. Pass it as a number or an array, which are traced, if the "
                "function does not need its value in Python."
            )
    for index, (was, now) in enumerate(zip(old_avals, new_avals, strict=True)):
        if was != now:
            where = new.label(fn, new.dynamic[index])
            return (
                f"the shape or dtype of {where} changed: it was {was.str_short()}, is "
                f"{now.str_short()}. Pad batches to one shape, or drop the last one."
            )
    return "its programs were forgotten or its context changed."


def _roles(signature: Signature) -> list[tuple[Any, ...]]:
    """For each leaf its role, and its type and value if it is static."""
    static = zip(signature.static_types, signature.statics, strict=True)
    return [
        (role, *next(static)) if role is Role.STATIC else (role,)
        for role in signature.roles
    ]


def _shown(value: object, limit: int = 120) -> str:
    if isinstance(value, Handle):  # to show its value makes it a reference here
        return f"another {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
