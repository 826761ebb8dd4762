"""Keys that do not keep an object alive: `Identity`."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import Concatenate, TypeVar

from jaxstrategy._src.values.arrays import Function

Owner = TypeVar("Owner")
Answer = TypeVar("Answer")


def of(
    owner: Owner, method: Callable[Concatenate[Owner, ...], object], *args: object
) -> Callable[..., None]:
    """A callback that calls `method(owner, *args, *given)` as long as `owner` lives."""
    # When the interpreter exits, the names of a module are None before the last objects
    # are gone. So the callback has all that it uses with it.
    get, is_finalizing = weakref.ref(owner), sys.is_finalizing

    def gone(*given: object) -> None:
        if is_finalizing():
            return
        alive = get()
        if alive is not None:
            method(alive, *args, *given)

    return gone


def asked(
    owner: Owner, method: Callable[Concatenate[Owner, ...], Answer]
) -> Callable[..., Answer | None]:
    """A function that returns `method(owner, *given)`; None if `owner` is gone."""
    get = weakref.ref(owner)

    def ask(*given: object) -> Answer | None:
        alive = get()
        return None if alive is None else method(alive, *given)

    return ask


def weakly(
    fn: Function, gone: Callable[[object], object] | None = None
) -> Callable[[], Function | None]:
    """A function that returns `fn` while it lives; `gone` is called when it dies."""
    try:
        if isinstance(fn, types.MethodType):
            # A method is made at each access: a plain reference would be dead at once.
            return weakref.WeakMethod(fn, gone)
        return weakref.ref(fn, gone)
    except TypeError:  # its type allows no weak references
        return lambda: fn


class Identity:
    """Equal for the same object, as long as it lives; keeps it alive if need be."""

    __slots__ = ("_id", "_get")

    def __init__(self, value: object) -> None:
        self._id = id(value)
        try:
            self._get = weakref.ref(value)
        except TypeError:  # its type allows no weak references
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._id != other._id:
            return False
        # An object that is gone may have left its `id` to another.
        mine = self._get()
        return mine is not None and mine is other._get()

    def __hash__(self) -> int:
        return self._id

    def watched(
        self, gone: Callable[[weakref.ref[object]], object]
    ) -> weakref.ref[object] | None:
        """A reference that calls `gone` when the object is, as long as it is kept."""
        value = self._get()
        try:
            return None if value is None else weakref.ref(value, gone)
        except TypeError:
            return None

    @property
    def is_gone(self) -> bool:
        """Whether nothing can be equal any more."""
        return self._get() is None

    def __repr__(self) -> str:
        value = self._get()
        return (
            "an object that is gone" if value is None else f"a {type(value).__name__}"
        )
