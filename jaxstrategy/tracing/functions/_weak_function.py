"""Functions that are referred to without being kept alive."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable

from jaxstrategy.values._types import Function


def weakly(
    fn: Function, forget: Callable[[], object] = lambda: None
) -> Callable[[], Function | None]:
    """A function that returns `fn` while it lives; `forget` is called when it dies."""

    def died(_: object) -> None:
        forget()

    try:
        if isinstance(fn, types.MethodType):
            # A method is made at each access: a plain reference would be dead at once.
            return weakref.WeakMethod(fn, died)
        return weakref.ref(fn, died)
    except TypeError:  # its type allows no weak references
        return lambda: fn
