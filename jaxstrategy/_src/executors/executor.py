"""Decorated and compiled steps, and the executors that run them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import os
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, final

import jax
from jax.stages import Compiled

from jaxstrategy._src.contexts import (
    context as _context,
    replica_context,
)
from jaxstrategy._src.contexts.context import OUTSIDE, AbstractStrategy, current
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import CompiledStepError, ContextError
from jaxstrategy._src.executors.eager_replicas import EagerCall
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.text import shown
from jaxstrategy._src.tracing import nnx
from jaxstrategy._src.tracing.function_cache import FunctionCache
from jaxstrategy._src.tracing.references import copy_source_location
from jaxstrategy._src.tracing.saved_step import (
    Facts,
    Obtain,
    Preparation,
    SavedStep,
    facts_of,
)
from jaxstrategy._src.tracing.step_agreement import StepAgreement
from jaxstrategy._src.tracing.traced_step import StepEnvironment, name_of
from jaxstrategy._src.values import building, per_replica, trees
from jaxstrategy._src.values.arrays import Arguments, Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.variable import Variable


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
        return self._executor.run(self._fn, (args, kwargs), self.options)

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
        bound = self._executor.bound(self._fn, self.options, objects)

        @functools.wraps(self._fn)
        def step(*rest: PyTree, **kwargs: PyTree) -> PyTree:
            if current().runs_eagerly is None:
                return bound(*rest, **kwargs)
            arguments = (*objects, *rest), kwargs
            return self._executor.run(self._fn, arguments, self.options)

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
        self._program = executor.compile(fn, (args, kwargs), options, self._obtain)

    def _obtain(self, preparation: Preparation) -> Compiled:
        """The executable of the traced step, read from the file or compiled."""
        if self._file is not None:
            # Read only now, so that other processes learn if the file is missing.
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
        except ValueError as error:  # raised by `save`
            self._facts = error
        return self.compiled

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        context = current()
        if context is OUTSIDE:  # the usual case, kept short
            return self._program(args, kwargs)
        if context.observer is not None and not context.in_step:
            context.observer(self._executor, self, (args, kwargs), self.options)
        executor = cast("CompiledExecutor", self._executor)
        return executor.run_compiled(self._program, self._fn, (args, kwargs))

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

    # Set by `update_wrapper`.
    __wrapped__: Any


def file_of(path: str | os.PathLike[str]) -> str:
    """The file of this process: each of several processes saves its own."""
    count = jax.process_count()
    number = f".{jax.process_index()}-of-{count}" if count > 1 else ""
    return f"{os.fsdecode(path)}{number}"


# One function, as an executor runs it on all replicas, outside of scopes and steps.
FunctionProgram = Callable[[Sequence[PyTree], dict[str, PyTree]], PyTree]


class AbstractExecutor(abc.ABC):
    """Runs functions on all replicas of a strategy: compiled, eagerly, or remotely."""

    def __init__(self, strategy: AbstractStrategy) -> None:
        self._strategy = strategy

    def program(
        self, fn: Function, options: RunOptions | None = None
    ) -> FunctionProgram:
        """Returns what calls `fn` as a step, outside of scopes and steps."""
        return lambda args, kwargs: self._run(fn, (tuple(args), kwargs), options)

    def bound(
        self, fn: Function, options: RunOptions | None, objects: Sequence[object]
    ) -> Callable[..., PyTree]:
        """`fn` with these first arguments, which are looked into only now."""
        call = (tuple(objects), {})
        nnx.require_objects(nnx.as_arrays(call, nnx.captured_by(fn))[0])
        return lambda *rest, **kwargs: self.run(
            fn, ((*objects, *rest), kwargs), options
        )

    def run(
        self, fn: Function, arguments: Arguments, options: RunOptions | None
    ) -> PyTree:
        """Calls `fn` as a step, in any context."""
        context = _context.current()
        if context is OUTSIDE:  # the usual case, kept short
            return self.program(fn, options)(*arguments)
        if context.observer is not None and not context.in_step:
            context.observer(self, fn, arguments, options)
        step_outputs = _context.around_steps()
        if step_outputs is None:
            return self._run(fn, arguments, options)
        with_outputs = step_outputs.with_outputs(fn)
        copy_source_location(with_outputs, fn)
        arguments = _context.without_sender(step_outputs, arguments)
        result, messages = self._run(with_outputs, arguments, options)
        for message in messages:
            step_outputs.receive(message)
        return result

    @abc.abstractmethod
    def _run(
        self, fn: Function, arguments: Arguments, options: RunOptions | None
    ) -> PyTree:
        """`run` without observer and step outputs."""

    @abc.abstractmethod
    def across(
        self, function: Callable[[PyTree], PyTree]
    ) -> Callable[[PyTree], PyTree]:
        """Lets `function` of one replica's version map those of all replicas."""

    @abc.abstractmethod
    def update(
        self, devices: tuple[Device, ...], fn: Function, arguments: Arguments
    ) -> PyTree:
        """Calls `fn` for each copy of the variables it changes."""

    def compile(
        self,
        fn: Function,
        arguments: Arguments,
        options: RunOptions | None,
        obtain: Obtain,
    ) -> FunctionProgram:
        """Compiles the program of such a call of `fn` ahead of time."""
        raise NotImplementedError(
            f"A {type(self._strategy).__name__} compiles a step where it runs, when it "
            "is scheduled: `compile` and `load_compiled` cannot do it before. Set up "
            "`js.experimental.compilation_cache(directory)` in each process instead."
        )

    @property
    def environment(self) -> StepEnvironment:
        replicas = self._strategy._replicas
        return StepEnvironment(
            replicas, self._as_replica, self._variables, self._strategy._overlap
        )

    def _as_replica(
        self, fn: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> PyTree:
        """Calls `fn` as one replica, while it is traced."""
        with self._in_replica():
            return fn(*args, **kwargs)

    @contextlib.contextmanager
    def _in_replica(self) -> Iterator[ReplicaContext]:
        """Enters the context of one replica of a step."""
        replica = ReplicaContext(self._strategy)
        with _context.entered(
            strategy=self._strategy, replica=replica, in_step=True, updated=()
        ):
            yield replica

    def _variables(self) -> list[Variable]:
        return cast("list[Variable]", access.usable_by(self._strategy))


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
        self._programs = FunctionCache(self.environment, self.agreement)
        self._update_programs: dict[tuple[Device, ...], FunctionCache] = {}

    def program(
        self, fn: Function, options: RunOptions | None = None
    ) -> FunctionProgram:
        return self._programs.of(fn, options)

    def bound(
        self, fn: Function, options: RunOptions | None, objects: Sequence[object]
    ) -> Callable[..., PyTree]:
        return self._programs.of(fn, options).bound(objects)

    def compile(
        self,
        fn: Function,
        arguments: Arguments,
        options: RunOptions | None,
        obtain: Obtain,
    ) -> FunctionProgram:
        # A cache of its own: the step shares no programs with other calls, and raises
        # where these would compile.
        cache = FunctionCache(self.environment, self.agreement)
        program = cache.of(fn, options)
        program.prepare(arguments, obtain)
        cache.is_frozen = True
        return program

    def run_compiled(
        self, program: FunctionProgram, fn: Function, arguments: Arguments
    ) -> PyTree:
        if _context.around_steps() is not None:
            raise ContextError(
                f"`{name_of(fn)}` was compiled ahead of time, without what it hands to "
                "the `MultiStepContext` around this call. Call the step itself."
            )
        return self._run(fn, arguments, None, program)

    def _run(
        self,
        fn: Function,
        arguments: Arguments,
        options: RunOptions | None,
        program: FunctionProgram | None = None,
    ) -> PyTree:
        context = _context.require_cross_replica(self._strategy, "run")
        if context.in_step:
            return self._run_in_step(fn, arguments)
        around = context.around if context.strategy is not None else None
        with contextlib.nullcontext() if around is None else around():
            if context.runs_eagerly is not None:
                # Its programs are those of the collectives.
                parts = self._strategy, self.environment, self._programs
                return EagerCall(*parts, self._processes, fn, options).run(arguments)
            return (program or self._programs.of(fn, options))(*arguments)

    def _run_in_step(self, fn: Function, arguments: Arguments) -> PyTree:
        """`run` inside `merge_call`: part of the same trace."""
        args, kwargs = replica_context.to_replica(arguments)
        named = jax.named_scope(replica_context.REPLICA_SCOPE)
        with self._in_replica() as replica, named:
            returned = fn(*args, **kwargs)
            return replica.to_cross(returned)

    def across(
        self, function: Callable[[PyTree], PyTree]
    ) -> Callable[[PyTree], PyTree]:
        program = self._programs.of(function)

        def mapped(value: PyTree) -> PyTree:
            if _context.current().in_step:
                return function(replica_context.to_replica(value, read_variables=True))
            return program((value,), {})

        return mapped

    def update(
        self, devices: tuple[Device, ...], fn: Function, arguments: Arguments
    ) -> PyTree:
        programs = self._update_programs.get(devices)
        if programs is None:
            call = functools.partial(self._update_copy, devices)
            programs = FunctionCache(dataclasses.replace(self.environment, call=call))
            programs = self._update_programs.setdefault(devices, programs)
        return programs.of(fn)(*arguments)

    def _update_copy(
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


@final
class EagerExecutor(AbstractExecutor):
    """Calls functions without a strategy; compiles nothing."""

    def _run(
        self, fn: Function, arguments: Arguments, options: RunOptions | None
    ) -> PyTree:
        _context.require_same(_context.current(), self._strategy)
        args, kwargs = _only_versions(arguments)
        with _context.outside():
            return fn(*args, **kwargs)

    def across(
        self, function: Callable[[PyTree], PyTree]
    ) -> Callable[[PyTree], PyTree]:
        return lambda value: function(_only_versions(value))

    def update(
        self, devices: tuple[Device, ...], fn: Function, arguments: Arguments
    ) -> PyTree:
        args, kwargs = arguments
        with _context.entered(updated=devices):
            return fn(*args, **kwargs)


def _only_versions(tree: PyTree) -> PyTree:
    """`tree` with the version of the only replica of each `PerReplica`."""

    def unwrap(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, PerReplica):
            return leaf
        building.check_stacked(per_replica.contents(leaf), 1, "value")
        return leaf.local(0)

    return trees.map_around_objects(unwrap, tree)
