"""Notices that one function is compiled again and again, and says what changed.

What counts is the function's code: a lambda written inside a loop is a new function at
each turn, and always the same code. A program that was called `WORTH` times was worth
compiling, and does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jaxstrategy import _source
from jaxstrategy._errors import RecompilationWarning
from jaxstrategy.tracing._roles import Role, Signature

# Compilations of one function that nobody needs to hear about: a few batch shapes,
# training and evaluation.
QUIET = 5
WORTH = 10


class Calls:
    """How often a function object was called; also tells it from another one."""

    def __init__(self) -> None:
        self.count = 0


class Log:
    """What was compiled for one strategy, by the code of the functions."""

    def __init__(self) -> None:
        # By identity: the code of a notebook cell that is run again is equal, not the
        # same.
        self._by_code: dict[int, History] = {}

    def of(self, fn: Callable[..., Any]) -> History:
        """The history of the code of `fn`."""
        code = getattr(fn, "__code__", None)
        if code is None:  # a callable object: only its own past counts
            return History()
        if not _source.is_users(code.co_filename):
            return History(quiet=True)
        if id(code) not in self._by_code:
            weakref.finalize(code, self._by_code.pop, id(code), None)
        return self._by_code.setdefault(id(code), History())


class History:
    """The compilations of one function's code.

    Attributes:
      told: the kinds of warnings about it that are given once, and were.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.told: set[type[Warning]] = set()
        self._quiet = quiet
        self._count = 0
        self._calls_before = 0
        self._last: tuple[Calls, Signature, Sequence[Any]] | None = None

    def record(
        self,
        fn: Callable[..., Any],
        calls: Calls,
        signature: Signature,
        avals: Sequence[Any],
    ) -> None:
        """Note a compilation; warn once when there have been too many.

        Args:
          fn: the function that is compiled.
          calls: of this function object.
          signature: of its arguments.
          avals: the types of its arrays.
        """
        last, self._last = self._last, (calls, signature, list(avals))
        if last is not None and last[0].count - self._calls_before >= WORTH:
            self._count = 0
        self._calls_before = calls.count - 1
        self._count += 1
        if self._quiet or last is None or self._count != QUIET + 1:
            return
        name = getattr(fn, "__qualname__", type(fn).__name__)
        message = (
            f"`{name}` is being compiled for the {self._count}th time, because "
            f"{_what_changed(fn, last, self._last)}"
        )
        _source.warn(message, RecompilationWarning)


def _what_changed(fn: Callable[..., Any], before: Any, after: Any) -> str:
    (old_fn, old, old_avals), (new_fn, new, new_avals) = before, after
    if old_fn is not new_fn:
        return (
            "it is a new function object each time, made anew in a loop or function. "
            "Define it once, outside, and pass what changes as an argument."
        )
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
        if a != b:
            return index, _text(a), _text(b)
    raise AssertionError("equal signatures share a program")


def _with_statics(signature: Signature) -> list[Any]:
    """For each leaf its role, and its type and value if it is static."""
    static = zip(signature.static_types, signature.statics, strict=True)
    return [
        (role, *next(static)) if role is Role.STATIC else (role,)
        for role in signature.roles
    ]


def _text(leaf: Any) -> str:
    role, *static = leaf
    return _shown(static[1]) if static else f"an array or number ({role.value})"


def _shown(value: Any, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
