"""A step that is compiled before it is called: `CompiledStep`."""

from __future__ import annotations

import functools
import os
import types
from typing import Any, final

import jax
from jax.stages import Compiled

from jaxstrategy._src.contexts.context import OUTSIDE, current
from jaxstrategy._src.executors.executor import AbstractExecutor
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.tracing.prepared import Preparation
from jaxstrategy._src.tracing.saved_step import Facts, SavedStep, facts_of
from jaxstrategy._src.values.arrays import Function, PyTree


@final
class ReplicatedFunction:
    """The replicated form of a function, with its name, signature and docstring.

    Made by `@strategy.run`. Called as the function is, with global values. On a class
    it makes a method: an object that is a registered pytree is passed as an argument
    like any other, any other object belongs to the step.
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


@final
class CompiledStep:
    """A step compiled for arguments of certain types; made by `strategy.compile`.

    Called as the step is, with the same results and errors. It never compiles: what
    differs from the types that it was compiled for is a `CompiledStepError`.

    Attributes:
      function: the step, as one replica sees it.
      options: how it is compiled.
      compiled: JAX's `jax.stages.Compiled`, for what it tells (`memory_analysis()`,
        `cost_analysis()`, `as_text()`).

    Args:
      fn: the step, as one replica sees it.
      args: positional arguments; types may stand for arrays.
      kwargs: keyword arguments.
      executor: runs it.
      options: how it is compiled.
      file: has it, as `save` has written it; None to compile it.

    Raises:
      TypeError: it is not made by a strategy.

    >>> import os, tempfile
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> def step(w, x):
    ...     return w - js.get_replica_context().all_reduce("mean", w * x)
    >>> types = jax.ShapeDtypeStruct((3,), np.float32)
    >>> batch = js.PerReplica(jax.ShapeDtypeStruct((2, 3), np.float32))
    >>> train = strategy.compile(step, (types, batch))
    >>> x = strategy.per_replica(np.ones((2, 3), np.float32))
    >>> train(np.ones(3, np.float32), x)
    Array([0., 0., 0.], dtype=float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "train.step")
    ...     train.save(path)
    ...     again = strategy.load_compiled(path, step, (types, batch))
    >>> again(np.ones(3, np.float32), x)
    Array([0., 0., 0.], dtype=float32)
    """

    def __init__(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        executor: AbstractExecutor,
        options: RunOptions | None = None,
        file: str | None = None,
    ) -> None:
        if not isinstance(executor, AbstractExecutor):
            raise TypeError(
                f"A `CompiledStep` was made with {shown(executor)} in place of what "
                "runs it. Let a strategy make it: `strategy.compile(step, args)`."
            )
        # First: an object that is called may have attributes named like those here.
        functools.update_wrapper(self, fn)
        self.function = self._fn = fn
        self.options = options
        self.compiled: Compiled
        self._executor = executor
        self._file = file
        self._facts: Facts | Exception
        self._program = executor.compile(fn, args, kwargs, options, self._obtain)

    def _obtain(self, preparation: Preparation) -> Compiled:
        """The program of the step that was traced, from the file or by XLA."""
        if self._file is not None:
            # Only now, when other processes hear of it if there is no such file.
            saved = SavedStep.read(self._file)
            self.compiled = saved.loaded(self._file, preparation)
            self._facts = saved.facts
            return self.compiled
        self.compiled = preparation.lower().compile()
        try:
            self._facts = facts_of(preparation)
        except ValueError as error:  # told by `save`, and only there
            self._facts = error
        return self.compiled

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        context = current()
        if context is OUTSIDE:  # the usual case, kept short
            return self._program(args, kwargs)
        if context.observer is not None and not context.in_step:
            context.observer(self._executor, self, args, kwargs, self.options)
        return self._executor.run_compiled(self._program, self._fn, args, kwargs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the compiled step into a file, for `strategy.load_compiled`.

        Only its owner may write or read the file: whoever can write it decides what
        the process that loads it runs. Each of several processes writes its own, named
        `path` with the number of the process behind it.

        Raises:
          CompiledStepError: JAX cannot serialize the step, as one that calls Python.
          OSError: the file cannot be written.
        """
        if isinstance(self._facts, Exception):
            raise self._facts
        name = getattr(self._fn, "__name__", type(self._fn).__name__)
        SavedStep.of(self.compiled, self._facts, name).write(file_of(path))

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        return f"<{name} compiled ahead of time>"

    # Which an object would have by `update_wrapper`, and it is called in another way.
    __wrapped__: Any


def file_of(path: str | os.PathLike[str]) -> str:
    """The file of this process, among those that several processes have saved."""
    count = jax.process_count()
    number = f".{jax.process_index()}-of-{count}" if count > 1 else ""
    return f"{os.fsdecode(path)}{number}"
