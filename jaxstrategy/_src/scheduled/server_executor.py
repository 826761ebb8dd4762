"""Steps of `run` outside of scheduled functions: `ServerExecutor`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import final

import jax

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.executors.executor import (
    AbstractExecutor,
    CompiledExecutor,
    FunctionProgram,
)
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.parameter_servers.protocol import Call
from jaxstrategy._src.parameter_servers.store import ServerPool
from jaxstrategy._src.parameter_servers.worker import WorkerEngine
from jaxstrategy._src.replicas.replicas import REPLICATED
from jaxstrategy._src.scheduled.arguments import is_whole
from jaxstrategy._src.scheduled.functions import FunctionTracer
from jaxstrategy._src.scheduled.values import WorkerArgument
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.arrays import Function, PyTree


@final
class ServerExecutor(CompiledExecutor):
    """Runs steps in this process that use variables of parameter servers."""

    compile = AbstractExecutor.compile  # it cannot

    def __init__(self, strategy: AbstractStrategy, pool: ServerPool) -> None:
        super().__init__(strategy)
        self._pool = pool
        self._one_call = threading.Lock()

    def program(
        self, fn: Function, options: RunOptions | None = None
    ) -> FunctionProgram:
        return _StepProgram(self, super().program(fn, options), fn)

    def _run(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
        program: FunctionProgram | None = None,
    ) -> PyTree:
        """The results of `fn`; in a function, as part of the same trace."""
        context = _context.require_cross_replica(self._strategy, "run")
        if context.in_step:
            return super()._run(fn, args, kwargs, options)
        return self.step(fn, args, kwargs)

    def step(
        self, fn: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> PyTree:
        """The results of a step that is taken now, by this process."""
        for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_whole):
            if isinstance(leaf, WorkerArgument):
                raise ContextError(
                    f"`run` was given {shown(leaf)} outside of a scheduled function, "
                    "but each worker has its own. Call `run` in a function that takes "
                    "it, and schedule that with a `ClusterCoordinator`."
                )
        prepared = self._tracer.prepare(fn, args, kwargs)
        call = Call(None, prepared.program.key, prepared.arguments_of(0))
        with self._one_call:
            self._engine.define(prepared.program)
            arrays = self._engine.call(call)
        where = self._strategy._replicas.sharding(REPLICATED)
        placed = [
            array if differs else jax.device_put(array, where)
            for array, differs in zip(arrays, prepared.varies, strict=True)
        ]
        return prepared.rebuild(placed)

    @functools.cached_property
    def _tracer(self) -> FunctionTracer:
        platform = self._strategy._replicas.devices[0].platform
        return FunctionTracer(
            self._strategy, self._pool, (platform,), call=self._as_replica
        )

    @functools.cached_property
    def _engine(self) -> WorkerEngine:
        return WorkerEngine(-1, self._pool.servers, self._strategy.devices)


@final
class _StepProgram:
    def __init__(
        self, executor: ServerExecutor, compiled: FunctionProgram, fn: Function
    ) -> None:
        self._executor, self._fn = executor, fn
        self.bound: Callable[..., Callable[..., PyTree]] = compiled.bound

    def __call__(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        return self._executor.step(self._fn, args, kwargs)
