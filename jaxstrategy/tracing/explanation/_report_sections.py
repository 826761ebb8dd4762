"""What the sections of a report are, and what several of them show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from jaxstrategy.charts._bars import ChartBar
from jaxstrategy.text._user_code import Line

MOST_VALUES = 12
"""So many arguments or results are shown; then their number."""

Row: TypeAlias = tuple[str, ...]


class Section(NamedTuple):
    """A part of a report.

    Attributes:
      heading: above it.
      header: titles of the columns of a table; none of no table.
      rows: of the table.
      problems: texts of several lines.
      bars: of a chart, which only notebooks show.
    """

    heading: str
    header: Row = ()
    rows: Sequence[Row] = ()
    problems: Sequence[str] = ()
    bars: Sequence[ChartBar] = ()


def short(line: Line | None) -> str:
    """A line of the user's code, with the file's name only."""
    if line is None:
        return "unknown"
    return f"{line.name}:{line.number}: {line.code}"


def around(loops: Sequence[int | None], in_branch: bool) -> Iterator[str]:
    """What is around something, in words."""
    for turns in loops:
        yield "in a loop, turns unknown" if turns is None else f"in {turns} turns"
    if in_branch:
        yield "in a branch"
