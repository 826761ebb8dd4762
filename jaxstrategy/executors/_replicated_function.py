"""A function that runs on all replicas whenever it is called: what `@run` returns."""

from __future__ import annotations

import functools
import types
from typing import Any, final

import jax

from jaxstrategy._options import RunOptions
from jaxstrategy.contexts._context import OUTSIDE, current
from jaxstrategy.executors._executor import AbstractExecutor
from jaxstrategy.values._types import Function, PyTree


@final
class ReplicatedFunction:
    """The replicated form of a function, with its name, signature and docstring.

    Made by `@strategy.run`. Called as the function is, with global values. On a class
    it makes a method: an object that is a registered pytree is passed as an argument
    like any other, any other object belongs to the step.

    Attributes:
      function: the function, as one replica sees it.
      options: how it is compiled.

    Args:
      fn: the function, as one replica sees it.
      executor: runs it.
      describe: the strategy, for `repr`.
      options: how it is compiled.
    """

    def __init__(
        self,
        fn: Function,
        executor: AbstractExecutor,
        describe: str,
        options: RunOptions | None = None,
    ) -> None:
        # First: an object that is called may have attributes named like those here.
        functools.update_wrapper(self, fn)
        self.function = self._fn = fn
        self.options = options
        self._executor = executor
        self._program = executor.program(fn, options)
        self._describe = describe

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if current() is OUTSIDE:  # the usual case, kept short
            return self._program(args, kwargs)
        return self._executor.run(self._fn, args, kwargs, self.options)

    def bind(self, *objects: object) -> Function:
        """The step with its first arguments, modules and optimizers of Flax NNX, fixed.

        At each call of the step itself its objects are looked through for what has
        changed. What this returns looks only now, and so costs little more than a step
        of arrays. Their arrays may change; add or replace no variables, and set no
        attributes, as `model.eval()` does, while it is in use.

        Returns:
          A function of the other arguments.

        Raises:
          TypeError: there is no such object among them.

        >>> import jax.numpy as jnp
        >>> import jaxstrategy as js
        >>> from flax import nnx
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> class Counter(nnx.Module):
        ...     def __init__(self):
        ...         self.total = nnx.Variable(jnp.zeros(()))
        >>> counter = Counter()
        >>> @strategy.run
        ... def count(counter, x):
        ...     counter.total[...] += js.get_replica_context().all_reduce("sum", x)
        >>> add = count.bind(counter)
        >>> add(strategy.per_replica([1.0, 2.0]))
        >>> counter.total[...]
        Array(3., dtype=float32)
        """
        bound = self._program.bound(objects)

        @functools.wraps(self._fn)
        def step(*rest: PyTree, **kwargs: PyTree) -> PyTree:
            if current().runs_eagerly is None:
                return bound(*rest, **kwargs)
            given = (*objects, *rest)
            return self._executor.run(self._fn, given, kwargs, self.options)

        return step

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if not jax.tree_util.all_leaves([instance]):
            return types.MethodType(self, instance)
        method = types.MethodType(self._fn, instance)
        return ReplicatedFunction(method, self._executor, self._describe, self.options)

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        return f"<{name} replicated by {self._describe}>"
