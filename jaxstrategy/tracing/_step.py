"""A function that runs on all replicas whenever it is called: what `@run` returns."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, final

import jax


@final
class Step:
    """The replicated form of a function, with its name, signature and docstring.

    Made by `@strategy.run`. Called as the function is, with global values. On a class
    it makes a method: an object that is a registered pytree is passed as an argument
    like any other, any other object belongs to the step.
    """

    def __init__(
        self, fn: Callable[..., Any], run: Callable[..., Any], describe: str
    ) -> None:
        self._fn = fn
        self._run = run
        self._describe = describe
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._fn, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if not jax.tree_util.all_leaves([instance]):
            return types.MethodType(self, instance)
        method = types.MethodType(self._fn, instance)
        return Step(method, self._run, self._describe)

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        return f"<{name} replicated by {self._describe}>"
