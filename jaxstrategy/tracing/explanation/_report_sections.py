"""What the sections of a report are, and what several of them show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from jaxstrategy.text._user_code import Line

MOST_VALUES = 12
"""So many arguments or results are shown; then their number."""

Row: TypeAlias = tuple[str, ...]
Section: TypeAlias = tuple[str, Row, Sequence[Row]]
"""Heading, titles of the columns, rows."""


def short(line: Line | None) -> str:
    """A line of the user's code, with the file's name only."""
    if line is None:
        return "unknown"
    return f"{line.name}:{line.number}: {line.code}"
