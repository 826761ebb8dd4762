"""The times of a training loop: `Profile`, and its `Report`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self, TypeVar, final

import jax

from jaxstrategy._src import text
from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.executors.executor import AbstractExecutor, CompiledStep
from jaxstrategy._src.executors.step_loop import number_of_steps
from jaxstrategy._src.inputs import origins
from jaxstrategy._src.inputs.origins import BatchWaits
from jaxstrategy._src.masks import number_of_examples
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.processes import job
from jaxstrategy._src.profiling import links
from jaxstrategy._src.profiling.metric_logger import MetricLogger
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.text import columns, whole, with_bytes, with_prefix, with_seconds
from jaxstrategy._src.tracing.explanation.compiled_program import Figures, figures
from jaxstrategy._src.tracing.explanation.explain import explain
from jaxstrategy._src.tracing.explanation.explanation import Explanation, Memory
from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.arrays import Arguments, Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import is_per_replica


class StepFacts(NamedTuple):
    """The facts of one call, as in `Report`. What is not known is None."""

    communication: float | None = None
    flops: float | None = None
    is_least: bool = False
    has_loops: bool = False
    memory: Memory | None = None


def _total(values: Sequence[float | None], factor: float) -> float | None:
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
        self._topology = topology
        self._compiled = compiled
        self._clock = clock
        self._found: list[StepFacts] = []
        self.seconds = 0.0  # that the analysis took

    def facts(self, steps: int) -> StepFacts:
        communication, flops, least, loops, memory = zip(
            *(self._found or [StepFacts()]), strict=True
        )
        # In a loop over the steps, one of them has been counted.
        has_loops = any(loops)
        counted = 1 if has_loops else steps
        return StepFacts(
            _total(communication, 1 / steps),
            _total(flops, 1 / counted),
            any(least),
            has_loops,
            max(memory, key=lambda each: each.peak if each else -1),
        )

    @contextlib.contextmanager
    def during(
        self, step: Function, args: tuple[Leaf, ...], kwargs: dict[str, Leaf]
    ) -> Iterator[None]:
        if self._compiled and isinstance(step, jax.stages.Wrapped):
            with self._timed():
                executable = step.lower(*args, **kwargs).compile()
                shardings = jax.tree.leaves(executable.output_shardings)
                devices = max((each.num_devices for each in shardings), default=1)
                of_xla = figures(executable)
                self._add(of_xla, devices, 0.0 if devices == 1 else None)
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
        arguments: Arguments,
        options: RunOptions | None,
    ) -> None:
        if executor is not self._executor:
            return
        # What is compiled ahead of time is asked itself, and not compiled once more.
        ahead = fn if isinstance(fn, CompiledStep) else None
        with self._timed():
            found = explain(
                fn if ahead is None else ahead.function,
                *arguments,
                environment=executor.environment,
                options=options or RunOptions(),
                topology=self._topology or Topology(1.0, 0.0, self._replicas.count),
                compiled=self._compiled and ahead is None,
            )
            of_xla: Explanation | Figures = found
            if self._compiled and ahead is not None:
                of_xla = figures(ahead.compiled)
            communication = 0.0
            if found.collectives and self._topology is not None:
                communication = found.communication_time(self._topology)
            elif found.collectives:
                communication = found.communication_time(self._measured, "ring")
            self._add(of_xla, len(self._replicas.all_devices), communication)

    def _add(
        self, of_xla: Explanation | Figures, devices: int, communication: float | None
    ) -> None:
        # In a function that is traced, nobody knows how often it is run.
        has_loops = of_xla.has_loops or arrays.is_traced()
        is_least = has_loops or bool(of_xla.uncounted_calls)
        flops = _total([of_xla.flops], devices)
        facts = StepFacts(communication, flops, is_least, has_loops, of_xla.memory)
        self._found.append(facts)

    @functools.cached_property
    def _measured(self) -> Topology:
        return links.measured(self._replicas)


T = TypeVar("T")
# The first call compiles, the second one is made on idle devices.
_TRACED_CALLS = range(2, 5)


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The speed of a training loop. Prints as a table. Times are seconds of one step.

    Made by `Profile.report`. What is not known is None.

    Attributes:
      name: the step's.
      calls: how many calls there were.
      steps: how many steps they made.
      first_call: the seconds of the first call, tracing and compiling included, until
        its results were there; it is in no other number.
      dispatch: how long the host needs to start a step, while the devices do not hold
        it up: the median time of a call, of all or of those on idle devices, whichever
        is less.
      between: how long Python is busy between two calls (or waits there: for a batch,
        or for a value that it reads), on average.
      input: of `between`, how long the loop waits for a batch.
      alone: the median time from a call on idle devices until its results are there.
        It includes starting the step, which a loop does while the devices work on the
        one before, so a step in the loop may take less.
      device: how long the devices are busy with a step, at most: the smaller one of
        `alone` and `step`, because they make one step after the other.
      step: how long a step takes in the loop: the time between two moments at which all
        steps before had been done, by the number of steps.
      examples_per_second: examples of one step by `step`.
      communication: how long the collectives of a step take, one after the other. A
        prediction: their bytes, which the analysis knows, over links as they were
        measured or given. XLA merges collectives, and does them while it computes, so
        the devices may well wait less.
      late: of several processes, whether one comes late to the steps, in a sentence.
      tokens_per_second: tokens of one step by `step`.
      flops: floating-point operations of one step on all devices: as given, or as XLA
        counts them in the compiled program, those that are computed a second time to
        save memory included.
      flops_are_least: whether there may be more, because XLA counts the body of a loop
        once and that of a kernel not at all. `flops=` of `profile` says how many there
        are. Of a function that calls `run`, the operations of these steps count.
      peak_flops: the most that all devices together can do in a second, as given.
      memory: of the compiled program on one device, as XLA plans it.
      peak_memory: the most bytes that were in use on one of this process's devices
        since it began, as that device says; None on CPUs.
      is_ahead: whether the step was compiled before its first call.

    >>> import jaxstrategy as js
    >>> report = js.profiling.Report("step", calls=100, steps=100, device=4e-3,
    ...     step=4e-3, communication=1e-3, flops=2e9, peak_flops=1e12)
    >>> report.communication_share, report.mfu
    (0.25, 0.5)
    >>> print(str(report).splitlines()[-1])
      model FLOPs utilization     50% of 1 TFLOP/s
    """

    name: str
    calls: int
    steps: int
    first_call: float | None = None
    dispatch: float | None = None
    between: float | None = None
    device: float | None = None
    step: float | None = None
    examples_per_second: float | None = None
    communication: float | None = None
    late: str | None = None
    input: float | None = None
    alone: float | None = None
    tokens_per_second: float | None = None
    flops: float | None = None
    flops_are_least: bool = False
    peak_flops: float | None = None
    memory: Memory | None = None
    peak_memory: int | None = None
    is_ahead: bool = False

    @property
    def communication_share(self) -> float | None:
        """The predicted `communication` in the time of the devices, at most 1."""
        if self.communication is None or not self.device:
            return None
        return min(self.communication / self.device, 1.0)

    @property
    def flops_per_second(self) -> float | None:
        """Floating-point operations in a second of the loop, on all devices."""
        return None if not self.flops or not self.step else self.flops / self.step

    @property
    def mfu(self) -> float | None:
        """The model FLOPs utilization: `flops_per_second` by `peak_flops`."""
        rate = self.flops_per_second
        return None if rate is None or not self.peak_flops else rate / self.peak_flops

    def scalars(self) -> dict[str, float]:
        """The numbers that are known of one step, by name, for a `MetricLogger`."""
        names = (
            "dispatch between input alone device step examples_per_second "
            "tokens_per_second flops_per_second mfu peak_memory communication_share"
        )
        found = {name: getattr(self, name) for name in names.split()}
        return {name: value for name, value in found.items() if value is not None}

    def _rows(self) -> Iterator[tuple[str, str]]:
        first = "first call" if self.is_ahead else "first call, with compiling"
        times = {
            first: self.first_call,
            "host, to start a step": self.dispatch,
            "host, between two calls": self.between,
            "  waiting for a batch": self.input,
            "one step by itself": self.alone,
            "devices, at most": self.device,
            "a step in the loop": self.step,
        }
        yield "steps", f"{self.steps}, in {self.calls} calls"
        for what, seconds in times.items():
            yield what, "not known" if seconds is None else with_seconds(seconds)
        rate, share = self.examples_per_second, self.communication_share
        yield "examples per second", "not known" if rate is None else with_prefix(rate)
        predicted = f"{share or 0:.0%} of the devices' time (predicted)"
        yield "communication", "not known" if share is None else predicted
        least = "at least " if self.flops_are_least else ""
        if self.tokens_per_second:
            yield "tokens per second", with_prefix(self.tokens_per_second)
        if self.flops_per_second:
            yield "operations", f"{least}{with_prefix(self.flops_per_second)}FLOP/s"
        if self.mfu:
            used = f"{self.mfu:.2g}" if self.mfu < 0.01 else f"{self.mfu:.0%}"
            peak = with_prefix(self.peak_flops or 0.0)
            yield "model FLOPs utilization", f"{least}{used} of {peak}FLOP/s"
        if self.memory is not None:
            yield "memory of a device, planned", with_bytes(self.memory.peak)
        if self.peak_memory:
            yield "memory of a device, in use", with_bytes(self.peak_memory)
        if self.late is not None:
            yield "processes", self.late

    def __str__(self) -> str:
        return "\n".join([f"`{self.name}`", *columns(list(self._rows()))])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return text.page(f"`{self.name}`", [text.table(("", ""), self._rows())])


@final
class Profile:
    """A step that is timed whenever it is called. Made by `Strategy.profile`.

    Args:
      step: what is called.
      analysis: finds what is known of a call besides its time.
      examples: how many a step has; by default the real rows of the batch it is given.
      tokens: how many a step has.
      flops: how many floating-point operations a step has, instead of XLA's count.
      peak_flops: the most of them that all devices can do in a second.
      devices: those whose memory is looked at.
      every: every so many calls the loop waits for the devices.
      trace_dir: where to write a trace.
      log: gets the times.
      clock: returns seconds.

    Raises:
      ValueError: `every` is less than 2.
      TypeError: it is not a whole number, or `step` cannot be called.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> @strategy.run
    ... def step(x):
    ...     return js.get_replica_context().all_reduce("sum", x)
    >>> with strategy.profile(step) as train:
    ...     totals = [train(strategy.per_replica([1.0, 2.0])) for _ in range(10)]
    >>> train
    <step with a stopwatch, 10 calls>
    >>> train.report().calls
    10
    """

    def __init__(
        self,
        step: Function,
        analysis: StepAnalysis,
        *,
        examples: int | None = None,
        tokens: int | None = None,
        flops: float | None = None,
        peak_flops: float | None = None,
        devices: Sequence[Device] = (),
        every: int = 50,
        trace_dir: str | os.PathLike[str] | None = None,
        log: MetricLogger | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not callable(step):
            raise TypeError(
                f"`profile` was given {step!r}, which cannot be called. Give what the "
                "loop calls: `train = strategy.profile(step)`."
            )
        number = whole(every)
        if number is None:
            raise TypeError(f"`every` was {every!r}; a number of calls was wanted.")
        if number < 2:
            raise ValueError(
                f"`every` was {number}; the loop can wait for the devices every 2 "
                "calls at most, or it would not be the loop that is timed."
            )
        self._step = step
        self._function = getattr(step, "function", step)
        self._name = getattr(step, "__name__", type(step).__name__)
        self._analysis = analysis
        self._examples = examples
        self._tokens = tokens
        self._flops = flops
        self._peak_flops = peak_flops
        self._devices = tuple(devices)
        self._every = number
        self._trace_dir = trace_dir
        self._is_tracing = False
        self._log = log
        self._clock = clock
        self._calls = self._steps = 0
        self._first: float | None = None
        self._facts = StepFacts()
        # Seconds of one step until its call returned; of those on idle devices also
        # until its results were there.
        self._dispatch: list[float] = []
        self._dispatch_alone: list[float] = []
        self._alone: list[float] = []
        self._between, self._input, self._loop = _Mean(), _Mean(), _Mean()
        self._waits = BatchWaits(clock)
        self._waited = 0.0  # of that, before the last call
        # When all steps had been done, and how many were begun since.
        self._idle: float | None = None
        self._begun = 0
        self._returned: float | None = None
        self._result: Leaf = None

    def __call__(self, *args: Leaf, **kwargs: Leaf) -> PyTree:
        """Calls the step, and returns its results."""
        called = self._clock()
        call, steps = self._calls, number_of_steps(self._function, args)
        if call == 0:
            self._examples = self._examples or _rows((args, kwargs))
        if self._returned is not None:
            self._between.add(called - self._returned, steps)
            self._input.add(self._waits.seconds - self._waited, steps)
        self._waited = self._waits.seconds
        is_traced = self._trace_dir is not None and call in _TRACED_CALLS
        is_alone = call % self._every == 1 and not is_traced
        begins_trace = is_traced and call == _TRACED_CALLS[0]
        was_idle = (is_alone or begins_trace) and self._wait()
        with contextlib.ExitStack() as stack:
            if call == 0:
                stack.enter_context(self._analysis.during(self._step, args, kwargs))
            if is_traced:
                self._start_trace()
                stack.enter_context(
                    jax.profiler.StepTraceAnnotation(self._name, step_num=call)
                )
            analyzed, start = self._analysis.seconds, self._clock()
            results = self._step(*args, **kwargs)
            end = self._clock()
        # A step that calls `run` is analyzed meanwhile.
        start += self._analysis.seconds - analyzed
        self._result = _smallest(results)
        self._calls, self._steps = call + 1, self._steps + steps
        if call == 0:
            self._facts = self._analysis.facts(steps)
            self._first = self._time_alone(start)
        elif is_traced:
            self._begun = 0  # tracing takes time
            if call == _TRACED_CALLS[-1]:
                self._wait()
                self._stop_trace()
        else:
            self._dispatch.append((end - start) / steps)
            self._begun += steps
            seconds = self._time_alone(start) if is_alone and was_idle else None
            if seconds is not None:
                self._dispatch_alone.append((end - start) / steps)
                self._alone.append(seconds / steps)
                self._write()
        self._returned = self._clock()
        return results

    def batches(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, while the time is taken for which the loop waits for them.

        Datasets of a strategy tell that by themselves; of others the profile does not
        know whether the loop waits for a batch or computes something.

        >>> import jaxstrategy as js
        >>> train = js.get_strategy().profile(lambda x: x + 1)
        >>> [train(x) for x in train.batches([1, 2])]
        [2, 3]
        """
        iterator = iter(batches)
        while True:
            with origins.waiting([self._waits]):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def report(self) -> Report:
        """The speed of the loop so far. Does not wait for the devices."""
        step, facts = self._loop.value, self._facts
        late = None  # if there is but one process, or nobody knows
        with contextlib.suppress(ClusterError):
            if (started := job.current()) and started.count > 1:
                late = job.stragglers().verdict
        used = [device.memory_stats() or {} for device in self._devices]
        peaks = [x["peak_bytes_in_use"] for x in used if "peak_bytes_in_use" in x]

        def rate(number: int | None) -> float | None:
            return number / step if number and step else None

        return Report(
            name=self._name,
            calls=self._calls,
            steps=self._steps,
            first_call=self._first,
            # A call also waits while too many steps are under way, but not if idle.
            dispatch=_least(self._dispatch_alone, self._dispatch),
            between=self._between.value,
            input=self._input.value,
            alone=_least(self._alone),
            device=_least(self._alone, [step]),
            step=step,
            examples_per_second=rate(self._examples),
            tokens_per_second=rate(self._tokens),
            communication=facts.communication,
            flops=self._flops or facts.flops,
            flops_are_least=facts.is_least and not self._flops,
            peak_flops=self._peak_flops,
            memory=facts.memory,
            peak_memory=max(peaks, default=None),
            late=late,
            is_ahead=isinstance(self._step, CompiledStep),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._wait()
                self._write()
        finally:
            self._stop_trace()

    def __repr__(self) -> str:
        return f"<{self._name} with a stopwatch, {self._calls} calls>"

    def _time_alone(self, start: float) -> float | None:
        """Seconds from `start` until all is done, if that can be told."""
        self._begun = 0  # they are not steps of a loop that does not wait
        return self._clock() - start if self._wait() else None

    def _wait(self) -> bool:
        """Until all steps are done; False if there is nothing left to tell by."""
        begun, self._begun = self._begun, 0
        since, self._idle = self._idle, None
        if self._result is None or self._result.is_deleted():
            return False
        jax.block_until_ready(self._result)
        self._idle = self._clock()
        if since is not None and begun:
            self._loop.add(self._idle - since, begun)
        return True

    def _write(self) -> None:
        if self._log is not None:
            scalars = self.report().scalars()
            # The loop waits when it suits the measurement, not every so many steps.
            self._log.always(
                self._steps, {f"profile/{k}": v for k, v in scalars.items()}
            )

    def _start_trace(self) -> None:
        if not self._is_tracing and jax.process_index() == 0:
            assert self._trace_dir is not None
            jax.profiler.start_trace(os.fspath(self._trace_dir))
            self._is_tracing = True

    def _stop_trace(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()


class _Mean:
    def __init__(self) -> None:
        self._seconds, self._steps = 0.0, 0

    def add(self, seconds: float, steps: int) -> None:
        self._seconds += seconds
        self._steps += steps

    @property
    def value(self) -> float | None:
        return self._seconds / self._steps if self._steps else None


def _least(*values: Sequence[float | None]) -> float | None:
    known = [[each for each in some if each is not None] for some in values]
    return min((statistics.median(some) for some in known if some), default=None)


def _smallest(results: PyTree) -> Leaf:
    """The smallest array: when it is there, all of its program are."""
    leaves = jax.tree.leaves(results)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "block_until_ready")]
    return min(arrays, key=lambda array: array.nbytes, default=None)


def _rows(given: PyTree) -> int | None:
    for leaf in jax.tree.leaves(given, is_leaf=is_per_replica):
        if origins.is_of_dataset(leaf):
            rows = number_of_examples(leaf)
            if rows is not None:
                return rows
    return None
