"""What a training loop waits for: `Limit`."""

from __future__ import annotations

import dataclasses
from typing import Literal, final

from jaxstrategy.text._units import with_seconds

_BUSY = 0.75
_SHARE = 0.5
_EXPLAINED = 0.6


@final
@dataclasses.dataclass(frozen=True)
class Limit:
    """What would have to get faster, so that a loop does. Prints as sentences.

    Attributes:
      name: `"input"`, `"host"`, `"small batch"`, `"communication"` or `"devices"`;
        `"unknown"` where the times that were measured do not explain the loop's.
      evidence: the measured times that say so.
      advice: what may help.

    >>> import jaxstrategy as js
    >>> report = js.profiling.Report("step", calls=9, steps=9, step=5e-3, alone=1.5e-3,
    ...     dispatch=0.5e-3, between=4e-3, input=3.8e-3)
    >>> report.limit.name
    'input'
    """

    name: Literal["input", "host", "small batch", "communication", "devices", "unknown"]
    evidence: str
    advice: str

    def __str__(self) -> str:
        if self.name == "unknown":
            return f"something unknown: {self.evidence} {self.advice}"
        article = {"communication": "", "small batch": "a "}.get(self.name, "the ")
        return f"{article}{self.name}: {self.evidence} {self.advice}"


@dataclasses.dataclass(frozen=True)
class LoopTimes:
    """Seconds of a step, in a loop and by itself.

    Attributes:
      step: in the loop, all included.
      alone: of a call on idle devices, until its results are there.
      dispatch: to start a step.
      between: of the host between two calls, `input` included.
      input: of waiting for a batch.
      communication: the share of it in the devices' time, None if that is not known.
    """

    step: float
    alone: float
    dispatch: float
    between: float
    input: float
    communication: float | None

    @property
    def busy(self) -> float:
        """The seconds that devices are busy with a step, at least.

        The call had returned when they still worked on it.
        """
        return min(max(self.alone - self.dispatch, 0.0), self.step)

    def limit(self) -> Limit:
        """What the loop waits for most."""
        if self.busy >= _BUSY * self.step:
            return self._of_devices()
        if self.busy + self.dispatch + self.between < _EXPLAINED * self.step:
            return self._of_something_else()
        return max(
            (self.input, self._of_input()),
            (self.between - self.input, self._of_host()),
            (self.dispatch, self._of_small_batches()),
            key=lambda found: found[0],
        )[1]

    @property
    def _told_busy(self) -> str:
        share = self.busy / self.step
        return (
            f"the devices are busy for {share:.0%} of the time or more "
            f"({with_seconds(self.busy)} of {with_seconds(self.step)} in each step)"
        )

    def _of_devices(self) -> Limit:
        if (self.communication or 0.0) >= _SHARE:
            return Limit(
                "communication",
                f"{self._told_busy}, and collectives take {self.communication:.0%} of "
                "that, as predicted from their bytes.",
                "Larger batches, `strategy.accumulate`, compression or local steps "
                "send less for each example.",
            )
        return Limit(
            "devices",
            f"{self._told_busy}.",
            "The loop keeps them fed; a faster step is what is left.",
        )

    def _of_input(self) -> Limit:
        return Limit(
            "input",
            f"the loop waits {with_seconds(self.input)} for a batch, and "
            f"{self._told_busy}.",
            "Read further ahead or with more workers, or prepare less in the source.",
        )

    def _of_host(self) -> Limit:
        return Limit(
            "host",
            f"Python is busy for {with_seconds(self.between - self.input)} between two "
            f"calls, and {self._told_busy}.",
            "Read no values of the step in the loop: `MetricLogger` writes them later.",
        )

    def _of_small_batches(self) -> Limit:
        return Limit(
            "small batch",
            f"the host needs {with_seconds(self.dispatch)} to start a step, and "
            f"{self._told_busy}.",
            "Give each step more examples, or make several in one call with "
            "`strategy.several`.",
        )

    def _of_something_else(self) -> Limit:
        host = with_seconds(self.dispatch + self.between)
        return Limit(
            "unknown",
            f"{self._told_busy}, and the host for {host}; what the rest of the time "
            "went into was not measured.",
            "The computer may have other work. A longer loop, or `trace_dir=`, tells "
            "more.",
        )
