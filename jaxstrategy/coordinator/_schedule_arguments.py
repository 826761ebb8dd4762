"""What users give to `schedule` and `evaluate`, checked."""

from __future__ import annotations

import types
from typing import Any

import jax

from jaxstrategy.coordinator._remote_value import RemoteValue
from jaxstrategy.coordinator._schedulable import CoordinatedFunction
from jaxstrategy.scheduled._worker_argument import IteratorArgument, is_whole
from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.values._types import Function, PyTree


def checked_arguments(
    args: Any, kwargs: Any
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """What a function is called with.

    Raises:
      TypeError: that is not how it is given, or a result is among it that may not be
        there yet.
    """
    if not isinstance(args, list | tuple | None):
        raise TypeError(
            f"`args` was a {type(args).__name__}; a list or a tuple of the arguments "
            "was wanted: `(x,)` for a single one."
        )
    if not isinstance(kwargs, dict | None):
        raise TypeError(
            f"`kwargs` was a {type(kwargs).__name__}; a dict of the arguments by their "
            "names was wanted."
        )
    given = tuple(args or ()), dict(kwargs or {})
    # A variable is an argument by itself: to look into it would read it.
    if any(map(is_remote, jax.tree.leaves(given, is_leaf=is_whole))):
        raise TypeError(
            "An argument of a function to be scheduled was a `RemoteValue`, which has "
            "its results when its own function has ended. Give what `get()` returns."
        )
    return given


def check_jitted(
    fn: Function, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> None:
    """Refuse an iterator for a function that JAX traces by itself: it takes arrays.

    Raises:
      TypeError: it is given one.
    """
    if not isinstance(fn, jax.stages.Wrapped):
        return
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
    if any(isinstance(leaf, IteratorArgument) for leaf in leaves):
        raise TypeError(
            f"{fn!r} is a jitted function, and was given a per-worker iterator, which "
            "`jax.jit` does not take. Decorate it with `@coordinator.function` instead "
            "of `@jax.jit`: it is compiled as well."
        )


def check_restarts(max_restarts: int | None, present: int | None = None) -> None:
    """Refuse a number of restarts that is none, or not that which there is.

    Raises:
      ValueError: the message says why.
    """
    found = 0 if max_restarts is None else whole(max_restarts)
    if found is None or found < 0:
        raise ValueError(
            f"`max_restarts` was {max_restarts!r}; a number of times was wanted, 0 for "
            "none."
        )
    if max_restarts is not None and present not in (None, found):
        raise ValueError(
            f"`max_restarts` was {max_restarts}, and the strategy has a coordinator "
            f"with {present} already. Close that one before."
        )


def plain(fn: Function) -> Function:
    """What is traced of a function."""
    if isinstance(fn, types.MethodType):
        return types.MethodType(plain(fn.__func__), fn.__self__)
    return fn.function if isinstance(fn, CoordinatedFunction) else fn


def number_of_shards(shards: int | None, default: int) -> int:
    """How many shards a user wants.

    Raises:
      ValueError: less than one.
    """
    found = default if shards is None else whole(shards)
    if found is None or found < 1:
        raise ValueError(f"`shards` was {shards!r}; at least one shard was wanted.")
    return found


def is_remote(leaf: object) -> bool:
    """Whether it is what a function will return."""
    return isinstance(leaf, RemoteValue)


def for_the_coordinator(method: str) -> str:
    """What to tell who calls a method in a scheduled function."""
    return (
        f"`{method}` was called by code that runs for a scheduled function. It is for "
        "the coordinator: let the function return what the next one needs, and "
        "schedule that where this one was scheduled."
    )
