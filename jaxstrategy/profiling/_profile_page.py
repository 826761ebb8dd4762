"""The report of a loop as HTML, with a picture of one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxstrategy.charts._timeline import TimelineLane, TimelineSpan, timeline
from jaxstrategy.profiling._limit import Limit
from jaxstrategy.text import _html_report as report
from jaxstrategy.text._html_colours import Colour


@dataclasses.dataclass(frozen=True)
class StepPicture:
    """The times of a step, as those of `Report`, and their chart."""

    step: float | None
    device: float | None
    dispatch: float | None
    between: float | None
    input: float | None
    communication: float | None

    def html(self) -> str:
        """A timeline of one step; nothing while it is not known."""
        if not self.step or self.device is None:
            return ""
        lanes = [
            TimelineLane("host", tuple(self._spans(self._host(), self.step))),
            TimelineLane("devices", tuple(self._spans(self._devices(), self.step))),
        ]
        title = "A step in the loop: how long host and devices are busy, at most"
        return timeline(title, lanes)

    def _host(self) -> Iterator[tuple[float, str, Colour]]:
        waits = self.input or 0.0
        yield self.dispatch or 0.0, "Python runs", Colour.HOST
        yield waits, "waits for a batch", Colour.INPUT
        yield (self.between or 0.0) - waits, "Python runs", Colour.HOST

    def _devices(self) -> Iterator[tuple[float, str, Colour]]:
        device, share = self.device or 0.0, self.communication or 0.0
        yield device * (1 - share), "compute", Colour.COMPUTE
        yield device * share, "communicate (predicted)", Colour.COMMUNICATION

    @staticmethod
    def _spans(
        found: Iterator[tuple[float, str, Colour]], end: float
    ) -> Iterator[TimelineSpan]:
        """One after the other, in any case not longer than the step."""
        at = 0.0
        for seconds, meaning, colour in found:
            until = min(at + seconds, end)
            if until > at:
                yield TimelineSpan(at, until, meaning, colour)
            at = until
        if at < end:
            yield TimelineSpan(at, end, "idle", Colour.IDLE)


def page(
    name: str,
    rows: Sequence[tuple[str, str]],
    picture: StepPicture,
    limit: Limit | None,
    more: Sequence[str],
) -> str:
    """A report.

    Args:
      name: of the step.
      rows: its table.
      picture: what is drawn.
      limit: what limits it.
      more: HTML of further sections.
    """
    told = "" if limit is None else report.paragraph(f"Limited by {limit}")
    table = report.table(("", ""), rows)
    return report.page(f"`{name}`", [told, picture.html(), table, *more])
