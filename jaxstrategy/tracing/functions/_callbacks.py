"""Callbacks for when something that is only referred to weakly is gone."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Concatenate, TypeVar

Owner = TypeVar("Owner")
Answer = TypeVar("Answer")


def of(
    owner: Owner, method: Callable[Concatenate[Owner, ...], object], *args: object
) -> Callable[..., None]:
    """A callback that calls `method(owner, *args, *given)` as long as `owner` lives.

    Args:
      owner: what is told; it is not kept alive.
      method: a function of its class.
      args: what the method is given before what the callback is given.
    """
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
