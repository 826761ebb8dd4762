"""How much of a run's time made progress: `Goodput`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import final

from jaxstrategy.charts._bars import BarPart, ChartBar, bars
from jaxstrategy.text import _html_report
from jaxstrategy.text._html_colours import Colour
from jaxstrategy.text._units import with_noun, with_seconds


@dataclasses.dataclass
class RecordedStart:
    """What is recorded from a start of the program until it ended, somehow.

    Attributes:
      start: when the record was opened, in seconds.
      last: when something was recorded last.
      begin: when the loop began, and with how many steps done; None if it did not.
      intervals: of one step or some in a row, how many were done before and after, and
        the seconds they took; the first step is by itself.
      saving: the seconds for which the loop waited for checkpoints.
    """

    start: float
    last: float
    begin: tuple[float, int] | None = None
    intervals: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)
    saving: float = 0.0


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Goodput:
    """The seconds of a run, by what they were spent on. Prints as a table.

    Attributes:
      total: from the first start to what was recorded last.
      productive: of steps whose results were kept.
      starting: from the opening of the record to the beginning of the loop: what the
        program sets up and restores.
      compiling: by which first steps took longer than steps do.
      saving: of waiting for checkpoints.
      lost: of steps that were made again after a restart.
      down: from what was recorded last to the next start, the start of Python included.
      attempts: how often the program was started.
      steps: how many steps are done.

    >>> import jaxstrategy as js
    >>> found = js.profiling.Goodput(100.0, productive=75.0, lost=10.0, down=15.0,
    ...     attempts=2, steps=300)
    >>> found.share
    0.75
    >>> print(found)
    Goodput 75% of 100 s: 300 steps, 2 starts
      productive  75 s  75%
      lost        10 s  10%
      down        15 s  15%
    """

    total: float
    productive: float = 0.0
    starting: float = 0.0
    compiling: float = 0.0
    saving: float = 0.0
    lost: float = 0.0
    down: float = 0.0
    attempts: int = 0
    steps: int = 0

    @property
    def share(self) -> float:
        """The goodput: the productive part of all time, from 0 to 1."""
        return self.productive / self.total if self.total else 0.0

    @property
    def other(self) -> float:
        """The seconds of nothing above, such as those after the last step."""
        known = sum(getattr(self, name) for name, _ in _PARTS)
        return max(self.total - known, 0.0)

    @staticmethod
    def of(attempts: Sequence[RecordedStart]) -> Goodput:
        """That of a run of these attempts, in order."""
        if not attempts:
            return Goodput(0.0)
        usual = _usual(attempts)
        kept = _kept(attempts)
        productive = lost = compiling = 0.0
        for attempt, end in zip(attempts, kept, strict=True):
            for number, (before, after, seconds) in enumerate(attempt.intervals):
                more = max(seconds - usual, 0.0) if number == 0 else 0.0
                share = _share_until(end, before, after)
                compiling += more
                productive += (seconds - more) * share
                lost += (seconds - more) * (1 - share)
        return Goodput(
            total=attempts[-1].last - attempts[0].start,
            productive=productive,
            starting=sum((a.begin or (a.last, 0))[0] - a.start for a in attempts),
            compiling=compiling,
            saving=sum(a.saving for a in attempts),
            lost=lost,
            down=sum(
                after.start - before.last
                for before, after in zip(attempts, attempts[1:], strict=False)
            ),
            attempts=len(attempts),
            steps=_steps(attempts),
        )

    def _rows(self) -> Iterator[tuple[str, float, Colour]]:
        for name, colour in (*_PARTS, ("other", Colour.HOST)):
            if seconds := getattr(self, name):
                yield name, seconds, colour

    @property
    def _title(self) -> str:
        starts = with_noun(self.attempts, "start")
        return (
            f"Goodput {self.share:.0%} of {with_seconds(self.total)}: "
            f"{with_noun(self.steps, 'step')}, {starts}"
        )

    def __str__(self) -> str:
        rows = list(self._rows())
        width = max((len(name) for name, _, _ in rows), default=0)
        lines = [
            f"  {name.ljust(width)}  {with_seconds(s)}  {s / self.total:.0%}"
            for name, s, _ in rows
        ]
        return "\n".join([self._title, *lines])

    __repr__ = __str__

    def html(self) -> str:
        """HTML with one bar of all parts."""
        parts = tuple(
            BarPart(seconds, name, colour, with_seconds(seconds))
            for name, seconds, colour in self._rows()
        )
        shown = with_seconds(self.total)
        chart = bars("Time of the run", [ChartBar("all starts", parts, shown)])
        return _html_report.section(self._title, chart)

    def _repr_html_(self) -> str:
        return _html_report.page("Goodput", [self.html()])


_PARTS = (
    ("productive", Colour.COMPUTE),
    ("starting", Colour.HOST),
    ("compiling", Colour.COMPILE),
    ("saving", Colour.SAVE),
    ("lost", Colour.PROBLEM),
    ("down", Colour.IDLE),
)


def _usual(attempts: Sequence[RecordedStart]) -> float:
    """The median time of steps that are not the first ones of their attempt."""
    found = [
        seconds / (after - before)
        for each in attempts
        for before, after, seconds in each.intervals[1:]
    ]
    return statistics.median(found) if found else 0.0


def _share_until(end: float, before: int, after: int) -> float:
    """The part of the steps from `before` to `after` that are not after `end`."""
    return min(max((end - before) / (after - before), 0.0), 1.0)


def _kept(attempts: Sequence[RecordedStart]) -> list[float]:
    """Of each attempt the number of its last step that was not made again."""
    kept, end = [], float("inf")
    for attempt in reversed(attempts):
        kept.append(end)
        if attempt.begin is not None:
            end = min(end, attempt.begin[1])
    return kept[::-1]


def _steps(attempts: Sequence[RecordedStart]) -> int:
    """How many are done."""
    for attempt in reversed(attempts):
        if attempt.intervals:
            return attempt.intervals[-1][1]
        if attempt.begin is not None:
            return attempt.begin[1]
    return 0
