"""What is known of a step before it is timed: `StepAnalysis`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import final

import jax

from jaxstrategy._src.contexts import context
from jaxstrategy._src.executors.compiled import CompiledStep
from jaxstrategy._src.executors.executor import AbstractExecutor
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.profiling import links
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.tracing.explanation import compiled_program
from jaxstrategy._src.tracing.explanation.facts import Memory
from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """The facts of one call, as in `Report`. What is not known is None."""

    communication: float | None = None
    flops: float | None = None
    is_least: bool = False
    memory: Memory | None = None


def _total(values: Sequence[float | None], factor: float) -> float | None:
    """The sum times `factor`; None if one of them is not known."""
    known = [value for value in values if value is not None]
    return sum(known) * factor if len(known) == len(values) else None


@final
class StepAnalysis:
    """Explains what a function runs on the replicas of a strategy while it is called.

    Whatever the function is: a step made by `@strategy.run` or `several`, or compiled
    ahead of time; a function that calls one, or `strategy.run`, in its body; or one
    compiled by `jax.jit`. Links are measured unless `topology` gives them; `compiled`
    says whether each step is compiled once more for XLA's figures.
    """

    def __init__(
        self,
        executor: AbstractExecutor,
        replicas: Replicas,
        *,
        topology: Topology | None = None,
        compiled: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor = executor
        self._replicas = replicas
        self._given = topology
        self._compiled = compiled
        self._clock = clock
        self._found: list[StepFacts] = []
        self.seconds = 0.0  # that the analysis took

    def facts(self, steps: int) -> StepFacts:
        """Those of a step, of all that one call has run, which made so many steps."""
        found = self._found or [StepFacts()]
        is_least = any(each.is_least for each in found)
        # In a loop over the steps, one of them has been counted.
        counted = 1 if is_least else steps
        return StepFacts(
            _total([each.communication for each in found], 1 / steps),
            _total([each.flops for each in found], 1 / counted),
            is_least,
            max((each.memory for each in found), key=lambda m: m.peak if m else -1),
        )

    @contextlib.contextmanager
    def during(
        self, step: Function, args: tuple[Leaf, ...], kwargs: dict[str, Leaf]
    ) -> Iterator[None]:
        """A `with` block in which `step` is called with these arguments."""
        if self._compiled and isinstance(step, jax.stages.Wrapped):
            with self._timed():
                executable = step.lower(*args, **kwargs).compile()
                shardings = jax.tree.leaves(executable.output_shardings)
                devices = max((each.num_devices for each in shardings), default=1)
                of_xla = compiled_program.figures(executable)
                flops = _total([of_xla.flops], devices)
                communication = 0.0 if devices == 1 else None
                self._found.append(
                    StepFacts(communication, flops, of_xla.has_loops, of_xla.memory)
                )
        with context.entered(observer=self._observe):
            yield

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = self._clock()
        try:
            with context.entered(observer=None):
                yield
        finally:
            self.seconds += self._clock() - start

    def _observe(
        self,
        executor: AbstractExecutor,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
    ) -> None:
        """Before a step is run with these arguments."""
        if executor is not self._executor:
            return
        # What is compiled ahead of time is asked itself, and not compiled once more.
        ahead = fn if isinstance(fn, CompiledStep) else None
        with self._timed():
            found = executor.explain(
                fn if ahead is None else ahead.function,
                args,
                kwargs,
                options=options or RunOptions(),
                topology=self._given or Topology(1.0, 0.0, self._replicas.count),
                compiled=self._compiled and ahead is None,
            )
            if self._compiled and ahead is not None:
                of_xla = compiled_program.figures(ahead.compiled)
                found = dataclasses.replace(found, **of_xla._asdict())
            flops = _total([found.flops], len(self._replicas.all_devices))
            # In a function that is traced, nobody knows how often it is run.
            is_least = found.has_loops or arrays.is_traced()
            communication = 0.0
            if found.collectives and self._given is not None:
                communication = found.communication_time(self._given)
            elif found.collectives:
                communication = found.communication_time(self._measured, "ring")
            self._found.append(StepFacts(communication, flops, is_least, found.memory))

    @functools.cached_property
    def _measured(self) -> Topology:
        return links.measured(self._replicas)
