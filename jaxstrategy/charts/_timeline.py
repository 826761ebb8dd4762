"""What happened when, in lanes under each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxstrategy.charts import _chart, _svg
from jaxstrategy.text._html_colours import Colour
from jaxstrategy.text._units import with_seconds

_LANE = 36
_SPAN = 14


@dataclasses.dataclass(frozen=True)
class TimelineSpan:
    """Something that takes a while.

    Attributes:
      begin: in seconds.
      end: in seconds.
      meaning: what it is, in the legend.
      colour: what it means.
      note: more, shown when the pointer rests on it.
    """

    begin: float
    end: float
    meaning: str
    colour: Colour
    note: str = ""


@dataclasses.dataclass(frozen=True)
class TimelineLane:
    """Spans of one process, device or thread, in any order."""

    label: str
    spans: tuple[TimelineSpan, ...]


def timeline(
    title: str,
    lanes: Sequence[TimelineLane],
    unit: Callable[[float], str] = with_seconds,
) -> str:
    """A chart of lanes over one axis of time, which begins with the first span.

    Args:
      title: what is shown.
      lanes: from above.
      unit: how a time since the beginning is written.
    """
    spans = [span for lane in lanes for span in lane.spans]
    first = min((span.begin for span in spans), default=0.0)
    length = max((span.end for span in spans), default=1.0) - first or 1.0
    parts = _axis(length, _LANE * len(lanes), unit)
    for number, lane in enumerate(lanes):
        parts += _lane(lane, number * _LANE, first, length, unit)
    height = _LANE * len(lanes) + 2 * _svg.LETTER
    legend = [(span.colour, span.meaning) for span in spans]
    return _chart.chart(title, _svg.drawing(title, height, parts), legend)


def _lane(
    lane: TimelineLane,
    top: float,
    first: float,
    length: float,
    unit: Callable[[float], str],
) -> list[str]:
    parts = [_svg.letters(lane.label, 0, top + _svg.LETTER)]
    for span in lane.spans:
        begin, end = ((x - first) / length for x in (span.begin, span.end))
        told = f"{span.meaning}, {unit(span.end - span.begin)}"
        told += f": {span.note}" if span.note else ""
        box = (top + _svg.LETTER + 5, _SPAN, span.colour, told)
        parts.append(_svg.box(begin, end, *box))
    return parts


def _axis(length: float, top: float, unit: Callable[[float], str]) -> list[str]:
    """Times at the beginning, in the middle and at the end."""
    parts = [_svg.line((0, top), (1, top))]
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        parts.append(_svg.line((share, top), (share, top + 4)))
        text = unit(share * length) if share else "0"
        parts.append(_svg.letters(text, share, top + 4 + _svg.LETTER, anchor))
    return parts
