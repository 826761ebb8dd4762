"""The speed of a loop: `Report`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import final

from jaxstrategy.text import _tables
from jaxstrategy.text._units import (
    with_prefix,
    with_seconds,
)


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
      dispatch: how long the host needs to start a step: the median time of a call.
      between: how long Python is busy between two calls (or waits there: for a batch,
        or for a value that it reads), on average.
      device: how long the devices need: the median time from a call on idle devices
        until its results are there. It includes starting the step, and is not hidden
        behind another one, so it is an upper bound of what a long loop needs.
      step: how long a step takes in the loop: the time between two moments at which all
        steps before had been done, by the number of steps.
      examples_per_second: examples of one step by `step`.
      communication: how long the collectives of a step take, one after the other. A
        prediction: their bytes, which the analysis knows, over links as they were
        measured or given. XLA merges collectives, and does them while it computes, so
        the devices may well wait less.
      late: of several processes, whether one comes late to the steps, in a sentence.

    >>> import jaxstrategy as js
    >>> report = js.profiling.Report("step", calls=100, steps=100, device=4e-3,
    ...     communication=1e-3, examples_per_second=16_000)
    >>> report.communication_share
    0.25
    >>> print(str(report).splitlines()[-1])
      communication               25% of the devices' time (predicted)
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

    @property
    def communication_share(self) -> float | None:
        """The predicted `communication` in the time of the devices, at most 1."""
        if self.communication is None or not self.device:
            return None
        return min(self.communication / self.device, 1.0)

    def scalars(self) -> dict[str, float]:
        """The numbers that are known of one step, by name, for a `MetricLogger`."""
        names = ("dispatch", "between", "device", "step", "examples_per_second")
        found = {name: getattr(self, name) for name in names}
        found["communication_share"] = self.communication_share
        return {name: value for name, value in found.items() if value is not None}

    def _rows(self) -> list[tuple[str, str]]:
        times = [
            ("first call, with compiling", self.first_call),
            ("host, to start a step", self.dispatch),
            ("host, between two calls", self.between),
            ("devices, a step by itself", self.device),
            ("a step in the loop", self.step),
        ]
        return [
            ("steps", f"{self.steps}, in {self.calls} calls"),
            *((what, _told(t, with_seconds)) for what, t in times),
            ("examples per second", _told(self.examples_per_second, with_prefix)),
            ("communication", _told(self.communication_share, _predicted)),
            *([] if self.late is None else [("processes", self.late)]),
        ]

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(what) for what, _ in rows)
        lines = [f"  {what.ljust(width)}  {value}" for what, value in rows]
        return "\n".join([f"`{self.name}`", *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _tables.html_table(self.name, ("", ""), self._rows())


def _told(value: float | None, how: Callable[[float], str]) -> str:
    return "not known" if value is None else how(value)


def _predicted(share: float) -> str:
    return f"{share:.0%} of the devices' time (predicted)"
