"""Bars that are compared with each other, each of one colour or of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxstrategy.charts import _chart, _svg
from jaxstrategy.text._html_colours import Colour

_BAR = 12
_ROW = 36


@dataclasses.dataclass(frozen=True)
class BarPart:
    """A part of a bar.

    Attributes:
      value: its length, in the unit of all others; negative is none.
      meaning: what it is, in the legend; "" if the bar's label says so.
      colour: what it means.
      shown: the value with its unit.
    """

    value: float
    meaning: str
    colour: Colour
    shown: str = ""

    @property
    def told(self) -> str:
        """What it says when the pointer rests on it."""
        shown = self.shown or format(self.value, "g")
        return f"{self.meaning}: {shown}" if self.meaning else shown


@dataclasses.dataclass(frozen=True)
class ChartBar:
    """A bar of parts, one after the other.

    Attributes:
      label: what it is, above its beginning.
      parts: in order.
      shown: its value with the unit, above its end.
      spread: the smallest and the largest value that were measured; None of one alone.
    """

    label: str
    parts: tuple[BarPart, ...]
    shown: str = ""
    spread: tuple[float, float] | None = None

    @property
    def value(self) -> float:
        """The length of all parts."""
        return sum(max(part.value, 0.0) for part in self.parts)


def one_part(
    label: str,
    value: float,
    shown: str,
    colour: Colour,
    spread: tuple[float, float] | None = None,
) -> ChartBar:
    """A bar of one colour, with `shown` at its end."""
    return ChartBar(label, (BarPart(value, "", colour, shown),), shown, spread)


def bars(title: str, rows: Sequence[ChartBar], end: float | None = None) -> str:
    """A chart of bars under each other, all beginning at zero.

    Args:
      title: what is compared, with the unit.
      rows: from above.
      end: the value of the full width; by default the largest one.
    """
    full = end or max((_reach(row) for row in rows), default=0.0) or 1.0
    parts = [part for i, row in enumerate(rows) for part in _row(row, i * _ROW, full)]
    drawing = _svg.drawing(title, _ROW * len(rows), parts)
    legend = [(part.colour, part.meaning) for row in rows for part in row.parts]
    return _chart.chart(title, drawing, legend)


def _reach(row: ChartBar) -> float:
    return max(row.value, 0.0 if row.spread is None else row.spread[1])


def _row(row: ChartBar, top: float, full: float) -> list[str]:
    text = top + _svg.LETTER
    below = top + _svg.LETTER + 6
    parts = [_svg.letters(row.label, 0, text), _svg.letters(row.shown, 1, text, "end")]
    begin = 0.0
    for part in row.parts:
        end = begin + max(part.value, 0.0)
        place = (min(begin / full, 1.0), min(end / full, 1.0))
        parts.append(_svg.box(*place, below, _BAR, part.colour, part.told))
        begin = end
    if row.spread is not None:
        parts += _whisker(*row.spread, below, full)
    return parts


def _whisker(least: float, most: float, top: float, full: float) -> list[str]:
    """A line from the smallest to the largest value, with an end at each."""
    first, last, middle = least / full, most / full, top + _BAR / 2
    return [
        _svg.line((first, middle), (last, middle), opacity=0.9),
        *(_svg.line((x, top), (x, top + _BAR), opacity=0.9) for x in (first, last)),
    ]
