"""Which functions may be scheduled, and how a plain one becomes such a function."""

from __future__ import annotations

import functools
import types
from typing import Any, final

import jax

from jaxstrategy.executors._replicated_function import ReplicatedFunction
from jaxstrategy.values._types import Function, PyTree


@final
class CoordinatedFunction:
    """A function that may be scheduled. Made by `ClusterCoordinator.function`.

    Called, it is the function as it was given.

    Attributes:
      function: as it was given.
    """

    def __init__(self, fn: Function) -> None:
        self.function = fn
        functools.update_wrapper(self, fn)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"<{name}, which may be scheduled>"


def is_schedulable(fn: object) -> bool:
    """Whether `fn` is a jitted function, a step of `run`, or marked as schedulable."""
    if isinstance(fn, types.MethodType):
        return is_schedulable(fn.__func__)
    return isinstance(fn, CoordinatedFunction | ReplicatedFunction | jax.stages.Wrapped)


def check_schedulable(fn: object) -> None:
    """Refuse what cannot be scheduled.

    Raises:
      TypeError: `fn` is a plain function, or none at all.
    """
    if is_schedulable(fn):
        return
    what = "a plain function" if callable(fn) else "no function"
    raise TypeError(
        f"`schedule` was given {fn!r}, {what}. It takes functions that are compiled as "
        "a whole: decorate yours with `@coordinator.function`, `@strategy.run` or "
        "`@jax.jit`."
    )
