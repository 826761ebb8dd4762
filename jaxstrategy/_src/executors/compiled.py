"""Steps compiled as one program: `CompiledExecutor`, `CompiledStep`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import types
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
from jax.stages import Compiled

from jaxstrategy._src.contexts import context as _context, replica_context, step_outputs
from jaxstrategy._src.contexts.context import (
    OUTSIDE,
    AbstractStrategy,
    Context,
    current,
)
from jaxstrategy._src.errors import CompiledStepError, ContextError
from jaxstrategy._src.executors.executor import AbstractExecutor, FunctionProgram
from jaxstrategy._src.executors.replica_threads.eager_steps import EagerSteps
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.tracing.programs import Programs
from jaxstrategy._src.tracing.saved_step import (
    Facts,
    Obtain,
    Preparation,
    SavedStep,
    facts_of,
)
from jaxstrategy._src.tracing.shared_programs import FrozenSignatures
from jaxstrategy._src.tracing.step_agreement import StepAgreement
from jaxstrategy._src.tracing.traced_step import name_of
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
            try:
                saved = SavedStep.read(self._file)
            except UnicodeEncodeError as error:
                raise CompiledStepError(
                    f"{self._file!r} is no path: {error}. Give the path that `save` "
                    "was given."
                ) from error
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


@final
class CompiledExecutor(AbstractExecutor):
    """Traces a function once as one replica sees it, and compiles it for all."""

    def __init__(
        self, strategy: AbstractStrategy, processes: Processes | None = None
    ) -> None:
        super().__init__(strategy)
        self.agreement = None
        if processes is not None and processes.count > 1:
            self.agreement = StepAgreement(processes)
        self._processes = processes
        self._programs = Programs(self._environment, self.agreement)
        self._updates_on: dict[tuple[Device, ...], Programs] = {}

    def program(
        self, fn: Function, options: RunOptions | None = None
    ) -> FunctionProgram:
        return self._programs.of(fn, options)

    def compile(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
        obtain: Obtain,
    ) -> FunctionProgram:
        seal = FrozenSignatures()
        # A table of its own: what is compiled ahead takes nothing from other calls of
        # the step, and refuses what these would compile.
        program = Programs(self._environment, self.agreement, seal).of(fn, options)
        program.prepare(args, kwargs, obtain)
        seal.is_closed = True
        return program

    def run_compiled(
        self,
        program: FunctionProgram,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        context: Context = _context.require_cross_replica(self._strategy, "run")
        if step_outputs.around_steps() is not None:
            raise ContextError(
                f"`{name_of(fn)}` was compiled ahead of time, without what it hands to "
                "the `MultiStepContext` around this call. Call the step itself."
            )
        if context.in_step:
            return self._run_in_step(fn, args, kwargs)
        if context.runs_eagerly is not None:
            return self._eager_steps.run(fn, args, kwargs, None)
        around = context.around
        if around is None or context.strategy is None:
            return program(args, kwargs)
        with around():
            return program(args, kwargs)

    def _run(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
    ) -> PyTree:
        context = _context.require_cross_replica(self._strategy, "run")
        if context.in_step:
            return self._run_in_step(fn, args, kwargs)
        around = context.around if context.strategy is not None else None
        with contextlib.nullcontext() if around is None else around():
            if context.runs_eagerly is not None:
                return self._eager_steps.run(fn, args, kwargs, options)
            return self._programs.of(fn, options)(args, kwargs)

    @functools.cached_property
    def _eager_steps(self) -> EagerSteps:
        def compiled(fn: Function, args: tuple[PyTree, ...]) -> PyTree:
            return self._programs.of(fn)(args, {})

        return EagerSteps(self._strategy, self._environment, compiled, self._processes)

    def _run_in_step(
        self, fn: Function, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> PyTree:
        """`run` inside `merge_call`: the step goes on, in the same trace."""
        args, kwargs = replica_context.to_replica((args, kwargs))
        named = jax.named_scope(replica_context.REPLICA_SCOPE)
        with self._in_replica() as replica, named:
            returned = fn(*args, **kwargs)
            return replica.to_cross(returned)

    def across(self, function: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
        if _context.current().in_step:
            return function(replica_context.to_replica(value, read_variables=True))
        return self._programs.of(function)((value,), {})

    def update(
        self,
        devices: tuple[Device, ...],
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        return self._updates(devices).of(fn)(args, kwargs)

    def _updates(self, devices: tuple[Device, ...]) -> Programs:
        found = self._updates_on.get(devices)
        if found is None:
            call = functools.partial(self._as_copy, devices)
            found = Programs(dataclasses.replace(self._environment, call=call))
        return self._updates_on.setdefault(devices, found)

    def _as_copy(
        self,
        devices: tuple[Device, ...],
        fn: Function,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        with _context.entered(
            strategy=self._strategy, replica=None, in_step=True, updated=devices
        ):
            return fn(*args, **kwargs)
