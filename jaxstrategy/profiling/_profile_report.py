"""The speed of a loop: `Report`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import final

from jaxstrategy.profiling import _profile_page
from jaxstrategy.profiling._comparison import Comparison
from jaxstrategy.profiling._goodput import Goodput
from jaxstrategy.profiling._limit import Limit, LoopTimes
from jaxstrategy.text._units import (
    with_bytes,
    with_prefix,
    with_seconds,
)
from jaxstrategy.text._wrapped import lines_of
from jaxstrategy.tracing.explanation._facts import Memory


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
        once. `flops=` of `profile` says how many there are. Of a function that calls
        `run`, the operations of these steps count.
      peak_flops: the most that all devices together can do in a second.
      memory: of the compiled program on one device, as XLA plans it.
      peak_memory: the most bytes that were in use on one of this process's devices
        since it began, as that device says; None on CPUs.
      comparison: with one replica.
      goodput: of the whole run, restarts included.
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
    comparison: Comparison | None = None
    goodput: Goodput | None = None
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

    @property
    def limit(self) -> Limit | None:
        """The cause that the loop waits for; None before it is measured."""
        step, alone, dispatch = self.step, self.alone, self.dispatch
        if not step or alone is None or dispatch is None:
            return None
        share = self.communication_share
        between, waits = self.between or 0.0, self.input or 0.0
        return LoopTimes(step, alone, dispatch, between, waits, share).limit()

    def scalars(self) -> dict[str, float]:
        """The numbers that are known of one step, by name, for a `MetricLogger`."""
        names = (
            "dispatch",
            "between",
            "input",
            "alone",
            "device",
            "step",
            "examples_per_second",
            "tokens_per_second",
            "flops_per_second",
            "mfu",
            "peak_memory",
            "communication_share",
        )
        found = {name: getattr(self, name) for name in names}
        if self.goodput is not None:
            found["goodput"] = self.goodput.share
        return {name: value for name, value in found.items() if value is not None}

    def _rows(self) -> list[tuple[str, str]]:
        times = [
            (
                "first call" if self.is_ahead else "first call, with compiling",
                self.first_call,
            ),
            ("host, to start a step", self.dispatch),
            ("host, between two calls", self.between),
            ("  waiting for a batch", self.input),
            ("one step by itself", self.alone),
            ("devices, at most", self.device),
            ("a step in the loop", self.step),
        ]
        return [
            ("steps", f"{self.steps}, in {self.calls} calls"),
            *((what, _told(t, with_seconds)) for what, t in times),
            ("examples per second", _told(self.examples_per_second, with_prefix)),
            ("communication", _told(self.communication_share, _predicted)),
            *((what, how(value)) for what, value, how in self._known() if value),
            *([] if self.late is None else [("processes", self.late)]),
        ]

    def _known(self) -> list[tuple[str, float | None, Callable[[float], str]]]:
        """What stands in the table where it is known only."""
        least = "at least " if self.flops_are_least else ""

        def used(share: float) -> str:
            return f"{least}{share:.2g}" if share < 0.01 else f"{least}{share:.0%}"

        def rate(flops: float) -> str:
            return f"{least}{with_prefix(flops)}FLOP/s"

        peak = with_prefix(self.peak_flops or 0.0)
        planned = None if self.memory is None else self.memory.peak
        return [
            ("tokens per second", self.tokens_per_second, with_prefix),
            ("operations", self.flops_per_second, rate),
            (
                "model FLOPs utilization",
                self.mfu,
                lambda share: f"{used(share)} of {peak}FLOP/s",
            ),
            ("memory of a device, planned", planned, with_bytes),
            ("memory of a device, in use", self.peak_memory, with_bytes),
        ]

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(what) for what, _ in rows)
        lines = [f"  {what.ljust(width)}  {value}" for what, value in rows]
        more = (self.limit, self.comparison, self.goodput)
        told = [str(each) for each in more if each is not None]
        if self.limit is not None:
            told[0] = lines_of(f"Limited by {told[0]}")
        return "\n".join([f"`{self.name}`", *lines, *told])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _profile_page.page(
            self.name,
            self._rows(),
            _profile_page.StepPicture(
                step=self.step,
                device=self.device,
                dispatch=self.dispatch,
                between=self.between,
                input=self.input,
                communication=self.communication_share,
            ),
            self.limit,
            [each.html() for each in (self.comparison, self.goodput) if each],
        )


def _told(value: float | None, how: Callable[[float], str]) -> str:
    return "not known" if value is None else how(value)


def _predicted(share: float) -> str:
    return f"{share:.0%} of the devices' time (predicted)"
