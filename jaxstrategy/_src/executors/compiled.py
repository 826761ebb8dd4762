"""Steps compiled as one program for all replicas: `CompiledExecutor`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import final

import jax

from jaxstrategy._src.contexts import context as _context, outbox, replica_context
from jaxstrategy._src.contexts.context import AbstractStrategy, Context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.executors.executor import AbstractExecutor, FunctionProgram
from jaxstrategy._src.executors.replica_threads.eager_steps import EagerSteps
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.tracing.prepared import Obtain
from jaxstrategy._src.tracing.programs import Programs
from jaxstrategy._src.tracing.replica_step import name_of
from jaxstrategy._src.tracing.shared_programs import Seal
from jaxstrategy._src.tracing.step_agreement import StepAgreement
from jaxstrategy._src.values.arrays import Function, PyTree


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
        """The compiled programs of `fn`, for each structure and type of arguments."""
        return self._programs.of(fn, options)

    def compile(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
        obtain: Obtain,
    ) -> FunctionProgram:
        """The program of one such call of `fn`, compiled before it is made."""
        seal = Seal()
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
        """The results of what `compile` gave, wherever `run` may be called."""
        context: Context = _context.require_cross_replica(self._strategy, "run")
        if outbox.around_steps() is not None:
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
        """The results on all replicas; in `merge_call`, as part of the same step."""
        context = _context.require_cross_replica(self._strategy, "run")
        if context.in_step:
            return self._run_in_step(fn, args, kwargs)
        if context.around is None or context.strategy is None:
            return self._run_outside(context, fn, args, kwargs, options)
        with context.around():
            return self._run_outside(context, fn, args, kwargs, options)

    def _run_outside(
        self,
        context: Context,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
    ) -> PyTree:
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
        """`function` of each replica's version, as a program of its own if outside."""
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
        """The results of `fn`, traced once as of one copy and compiled for all."""
        return self._updates(devices).of(fn)(args, kwargs)

    def _updates(self, devices: tuple[Device, ...]) -> Programs:
        """The programs of functions that are told these devices."""
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
        """A call of `fn` that updates one copy, while it is traced."""
        with _context.entered(
            strategy=self._strategy, replica=None, in_step=True, updated=devices
        ):
            return fn(*args, **kwargs)
