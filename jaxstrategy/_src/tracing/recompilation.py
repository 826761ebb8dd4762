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
from collections.abc import Hashable, Sequence
from typing import TypeAlias

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


class Seen:
    """The values that a function refers to, as far as messages tell of them."""

    def __init__(self, references: References | None) -> None:
        self.opaque = None if references is None else references.opaque
        self._labels: list[str] = []
        self._texts: list[str] = []
        self._kinds: list[type] = []
        self._tokens: tuple[Hashable, ...] = ()
        if references is not None:
            self._tokens = references.form
            for step in references.reached:
                self._labels.append(step.label)
                self._kinds.append(type(step.value))
                self._texts.append(_told(step.value))

    def difference(self, other: Seen) -> tuple[str, bool]:
        """The difference from `other` in words, and whether it is data."""
        if other.opaque is not None:
            what = f"`{other.opaque}`, {other._text_of(other.opaque)},"
            return (
                f"it is a new function object each time and uses {what} of which "
                "Python does not say whether it has changed. Define the function once, "
                "outside, or pass what changes as an argument."
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

    def _text_of(self, label: str) -> str:
        known = dict(zip(self._labels, self._texts, strict=True))
        return known.get(label, "more than can be looked through")


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def _told(value: Leaf) -> str:
    if type(value) in (bool, int, float, complex, str, bytes, type(None)):
        return _shown(value)
    if isinstance(value, type) or issubclass(type(value), _FUNCTIONS):
        return _shown(value)
    if issubclass(type(value), (jax.Array, np.ndarray)):
        return f"another {array_type(value.dtype, value.shape)}"
    return f"a {type(value).__name__}"


class Calls:
    """The number of calls of functions of one form."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.count = 0


class Log:
    """All compilations of one strategy, by the code of the functions."""

    def __init__(self) -> None:
        # By identity: the code of a notebook cell that is run again is equal, not the
        # same.
        self._by_code: dict[int, History] = {}

    def of(self, fn: Function) -> History:
        """The history of the code of `fn`."""
        code = code_of(fn)
        if code is None:  # a callable object: only its own past counts
            return History()
        if not user_code.is_users(code.co_filename):
            return History(quiet=True)
        if id(code) not in self._by_code:
            weakref.finalize(code, self._by_code.pop, id(code), None)
        return self._by_code.setdefault(id(code), History())


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
            what, is_data = last[0].seen.difference(calls.seen)
        self._count_of_data += is_data
        soon = is_data and self._count_of_data >= QUIET_DATA
        if not self._was_told and (soon or self._count > QUIET):
            self._was_told = True
            self._warn(fn, what or _what_of_arguments(fn, last[1:], self._last[1:]))

    def _warn(self, fn: Function, what: str) -> None:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        number = "3rd" if self._count == 3 else f"{self._count}th"
        user_code.warn(
            f"`{name}` is being compiled for the {number} time, because {what}",
            RecompilationWarning,
        )


_Arguments: TypeAlias = tuple[Signature, Sequence[ArrayType]]


def _what_of_arguments(fn: Function, before: _Arguments, after: _Arguments) -> str:
    (old, old_avals), (new, new_avals) = before, after
    if old.treedef != new.treedef:
        return (
            "the structure of its arguments changed: it was "
            f"{_shown(old.treedef)}, is {_shown(new.treedef)}. Pass the same "
            "containers with the same keys each time."
        )
    if old != new:
        index, was, now = _changed_static(old, new)
        where = new.label(fn, index)
        return (
            f"the static argument {where} changed: it was {was}, is {now}. Pass it "
            "as a number or an array, which are traced, if the function does not need "
            "its value in Python."
        )
    for index, (was, now) in enumerate(zip(old_avals, new_avals, strict=True)):
        if was != now:
            where = new.label(fn, new.dynamic[index])
            return (
                f"the shape or dtype of {where} changed: it was {was.str_short()}, is "
                f"{now.str_short()}. Pad batches to one shape, or drop the last one."
            )
    return "its programs were forgotten or its context changed."


def _changed_static(old: Signature, new: Signature) -> tuple[int, str, str]:
    was, now = _with_statics(old), _with_statics(new)
    for index, (a, b) in enumerate(zip(was, now, strict=True)):
        # By value, a variable would be read here, where JAX traces.
        has_handle = isinstance(a[-1], Handle) or isinstance(b[-1], Handle)
        if a[-1] is not b[-1] if has_handle else a != b:
            return index, _text(a), _text(b)
    raise AssertionError("equal signatures share a program")


def _with_statics(signature: Signature) -> list[tuple[Leaf, ...]]:
    """For each leaf its role, and its type and value if it is static."""
    static = zip(signature.static_types, signature.statics, strict=True)
    return [
        (role, *next(static)) if role is Role.STATIC else (role,)
        for role in signature.roles
    ]


def _text(leaf: Leaf) -> str:
    role, *static = leaf
    return _shown(static[1]) if static else f"an array or number ({role.value})"


def _shown(value: object, limit: int = 120) -> str:
    if isinstance(value, Handle):  # to show its value makes it a reference here
        return f"another {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
