"""References that do not keep an object alive, for callbacks and cache keys."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import Concatenate, TypeVar

from jaxstrategy._src.values.arrays import Function

Owner = TypeVar("Owner")
Answer = TypeVar("Answer")


def weak_method(
    owner: Owner, method: Callable[Concatenate[Owner, ...], Answer], *args: object
) -> Callable[..., Answer | None]:
    """`method(owner, *args, ...)` without keeping `owner` alive; None once it is gone.

    For callbacks of finalizers, too.
    """
    # When the interpreter exits, the names of a module are None before the last objects
    # are gone. So the callback has all that it uses with it.
    get, is_finalizing = weakref.ref(owner), sys.is_finalizing

    def call(*more: object) -> Answer | None:
        if is_finalizing():
            return None
        alive = get()
        return None if alive is None else method(alive, *args, *more)

    return call


def weak_function(
    fn: Function, on_death: Callable[[object], object] | None = None
) -> Callable[[], Function | None]:
    """Returns `fn` while it lives; `on_death` is called when it dies."""
    try:
        if isinstance(fn, types.MethodType):
            # A method is made at each access: a plain reference would be dead at once.
            return weakref.WeakMethod(fn, on_death)
        return weakref.ref(fn, on_death)
    except TypeError:  # its type allows no weak references
        return lambda: fn


class Identity:
    """Hashable identity of an object, kept alive only if it allows no weak reference.

    After the object died it equals nothing, though another may get the same `id`.
    """

    __slots__ = ("_id", "get")

    def __init__(self, value: object) -> None:
        self._id = id(value)
        try:
            self.get = weakref.ref(value)
        except TypeError:
            self.get = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._id != other._id:
            return False
        value = self.get()
        if value is None and (self.is_gone or other.is_gone):
            return False
        return other.get() is value

    def __hash__(self) -> int:
        return self._id

    def watch(self, on_death: Callable[[object], object]) -> object:
        """A reference that calls `on_death` as long as it is kept, if it may die."""
        if not isinstance(self.get, weakref.ref) or (value := self.get()) is None:
            return None
        return weakref.ref(value, on_death)

    @property
    def is_gone(self) -> bool:
        """Whether the object died."""
        return self.get() is None and isinstance(self.get, weakref.ref)

    def is_of(self, value: object) -> bool:
        """Whether it is that of `value`: of None only if it always was."""
        return self.get() is value and not (value is None and self.is_gone)
