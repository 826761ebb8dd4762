"""A step with a stopwatch: `Profile`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self, TypeVar, final

import jax

from jaxstrategy._errors import ClusterError
from jaxstrategy.executors._replicated_function import CompiledStep
from jaxstrategy.executors._step_loop import number_of_steps
from jaxstrategy.inputs import _origins
from jaxstrategy.inputs._batch_waits import BatchWaits
from jaxstrategy.masks._filled_rows import number_of_examples
from jaxstrategy.processes import _job
from jaxstrategy.profiling._comparison import Comparison
from jaxstrategy.profiling._logger import MetricLogger
from jaxstrategy.profiling._profile_report import Report
from jaxstrategy.profiling._profiler_trace import Tracing
from jaxstrategy.profiling._run_record import RunRecord
from jaxstrategy.profiling._step_analysis import Analyzes, StepFacts
from jaxstrategy.replicas._devices import Device
from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.values._per_replica import is_per_replica
from jaxstrategy.values._types import Function, Leaf, PyTree, Value

T = TypeVar("T")


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
      comparison: with one replica, for the report.
      record: of the run, for the report.
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
        analysis: Analyzes,
        *,
        examples: int | None = None,
        tokens: int | None = None,
        flops: float | None = None,
        peak_flops: float | None = None,
        devices: Sequence[Device] = (),
        every: int = 50,
        trace_dir: str | os.PathLike[str] | None = None,
        log: MetricLogger | None = None,
        comparison: Comparison | None = None,
        record: RunRecord | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not callable(step):
            raise TypeError(
                f"`profile` was given {step!r}, which cannot be called. Give what the "
                "loop calls: `train = strategy.profile(step)`."
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
        self._comparison = comparison
        self._record = record
        self._every = _checked_every(every)
        self._tracing = Tracing(trace_dir)
        self._log = log
        self._clock = clock
        self._calls = self._steps = 0
        self._first: float | None = None
        self._facts = StepFacts()
        self._dispatch: list[float] = []
        self._alone: list[_LoneCall] = []
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
        self._note_between(called, steps)
        is_traced = self._tracing.wants(call)
        is_alone = call % self._every == 1 and not is_traced
        was_idle = (is_alone or self._tracing.is_first(call)) and self._wait()
        with self._around(call, steps, args, kwargs):
            analyzed, start = self._analysis.seconds, self._clock()
            results = self._step(*args, **kwargs)
            end = self._clock()
        # A step that calls `run` is analyzed meanwhile.
        start += self._analysis.seconds - analyzed
        self._result = _smallest(results)
        self._calls, self._steps = call + 1, self._steps + steps
        if call == 0:
            self._first = self._time_alone(start)
        elif is_traced:
            self._end_traced(call)
        else:
            self._dispatch.append((end - start) / steps)
            self._begun += steps
            if is_alone and was_idle:
                self._note_alone(start, end, steps)
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
            with self._waits.waiting():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    @contextlib.contextmanager
    def _around(
        self,
        call: int,
        steps: int,
        args: tuple[Leaf, ...],
        kwargs: dict[str, Leaf],
    ) -> Iterator[None]:
        """Where a call is made: the first one is analyzed, some others are traced."""
        with contextlib.ExitStack() as stack:
            if call == 0:
                stack.enter_context(self._analysis.during(self._step, args, kwargs))
            stack.enter_context(self._tracing.call(self._name, call))
            yield
        if call == 0:
            self._facts = self._analysis.facts.by_step(steps)

    def _note_between(self, called: float, steps: int) -> None:
        """The host's time since the last call returned, until this one."""
        if self._returned is not None:
            self._between.add(called - self._returned, steps)
            self._input.add(self._waits.seconds - self._waited, steps)
        self._waited = self._waits.seconds

    def _time_alone(self, start: float) -> float | None:
        """Seconds from `start` until all is done, if that can be told."""
        self._begun = 0  # they are not steps of a loop that does not wait
        return self._clock() - start if self._wait() else None

    def _note_alone(self, start: float, end: float, steps: int) -> None:
        seconds = self._time_alone(start)
        if seconds is not None:
            self._alone.append(_LoneCall((end - start) / steps, seconds / steps))
            self._write()

    def _end_traced(self, call: int) -> None:
        self._begun = 0  # tracing takes time
        if self._tracing.is_last(call):
            self._wait()
            self._tracing.stop()

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

    def report(self) -> Report:
        """The speed of the loop so far. Does not wait for the devices."""
        step, facts = self._loop.value, self._facts
        alone = _median([each.seconds for each in self._alone])
        return Report(
            name=self._name,
            calls=self._calls,
            steps=self._steps,
            first_call=self._first,
            dispatch=self._unhindered,
            between=self._between.value,
            input=self._input.value,
            alone=alone,
            device=_least(alone, step),
            step=step,
            examples_per_second=_rate(self._examples, step),
            tokens_per_second=_rate(self._tokens, step),
            communication=facts.communication,
            flops=self._flops or facts.flops,
            flops_are_least=facts.is_least and not self._flops,
            peak_flops=self._peak_flops,
            memory=facts.memory,
            peak_memory=_peak_memory(self._devices),
            late=_late(),
            comparison=self._comparison,
            goodput=None if self._record is None else self._record.goodput(),
            is_ahead=isinstance(self._step, CompiledStep),
        )

    @property
    def _unhindered(self) -> float | None:
        """The host's time to start a step.

        A call also waits while too many steps are under way, but not on idle devices.
        """
        alone = _median([each.dispatch for each in self._alone])
        return _least(alone, _median(self._dispatch))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._wait()
                self._write()
        finally:
            self._tracing.stop()

    def __repr__(self) -> str:
        return f"<{self._name} with a stopwatch, {self._calls} calls>"


@dataclasses.dataclass(frozen=True)
class _LoneCall:
    """A call on idle devices: seconds of one step until it returned, and was done."""

    dispatch: float
    seconds: float


class _Mean:
    """Seconds by the step, over many."""

    def __init__(self) -> None:
        self._seconds, self._steps = 0.0, 0

    def add(self, seconds: float, steps: int) -> None:
        self._seconds += seconds
        self._steps += steps

    @property
    def value(self) -> float | None:
        return self._seconds / self._steps if self._steps else None


def _late() -> str | None:
    """The process that is late; None if there is but one, or nobody knows."""
    with contextlib.suppress(ClusterError):
        if (started := _job.current()) and started.count > 1:
            return _job.stragglers().verdict
    return None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _rate(number: int | None, seconds: float | None) -> float | None:
    return number / seconds if number and seconds else None


def _peak_memory(devices: Sequence[Device]) -> int | None:
    """The bytes in use at most, on the one of these devices that used most."""
    stats = [device.memory_stats() or {} for device in devices]
    return max(
        (s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s),
        default=None,
    )


def _smallest(results: PyTree) -> Leaf:
    """The smallest array: when it is there, all of its program are."""
    leaves = jax.tree.leaves(results)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "block_until_ready")]
    return min(arrays, key=lambda array: array.nbytes, default=None)


def _rows(given: PyTree) -> int | None:
    """The rows on all replicas of the first batch that comes from a dataset."""
    for leaf in jax.tree.leaves(given, is_leaf=is_per_replica):
        if (
            _origins.is_of_dataset(leaf)
            and (rows := number_of_examples(leaf)) is not None
        ):
            return rows
    return None


def _checked_every(every: Value) -> int:
    number = whole(every)
    if number is None:
        raise TypeError(f"`every` was {every!r}; a number of calls was wanted.")
    if number < 2:
        raise ValueError(
            f"`every` was {number}; the loop can wait for the devices every 2 calls "
            "at most, or it would not be the loop that is timed."
        )
    return number
