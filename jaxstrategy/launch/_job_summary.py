"""What became of a job, as a page: `JobSummary`."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Sequence
from typing import TypeAlias, final

from jaxstrategy.charts._timeline import TimelineLane, TimelineSpan, timeline
from jaxstrategy.launch._attempt import Outcome
from jaxstrategy.launch._exit_meanings import described, signal_name
from jaxstrategy.text import _html_report
from jaxstrategy.text._html_colours import Colour
from jaxstrategy.text._units import with_noun, with_seconds

Row: TypeAlias = tuple[int, int, str, str, str]
_HEADER = ("attempt", "rank", "began after", "ran for", "end")
_MOST_LANES = 32
_MOST_ROWS = 64
_MEANINGS = {
    Colour.COMPUTE: "ran and ended well",
    Colour.PROBLEM: "ran and failed",
    Colour.IDLE: "was ended, by another's failure or a signal",
}


@final
@dataclasses.dataclass(frozen=True)
class JobSummary:
    """The attempts of a job, and how each process ended; in a notebook a page.

    Attributes:
      name: of the script or module.
      outcomes: of the attempts, in order.
      code: the launcher's exit code.
    """

    name: str
    outcomes: tuple[Outcome, ...]
    code: int

    def page(self) -> str:
        """A whole HTML document, light or dark as the browser is."""
        title = html.escape(self._title().replace("`", ""))
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f'<meta name="color-scheme" content="light dark"><title>{title}</title>'
            '</head><body style="font-family:sans-serif;margin:1.5em">'
            f"{self._repr_html_()}</body></html>\n"
        )

    def _repr_html_(self) -> str:
        return _html_report.page(self._title(), self._parts())

    def _title(self) -> str:
        attempts = with_noun(len(self.outcomes), "attempt")
        how = "ended well" if self.code == 0 else f"ended with exit code {self.code}"
        return f"`{self.name}` {how} after {attempts}, {with_seconds(self._seconds)}"

    @property
    def _seconds(self) -> float:
        ends = (o.begun + s for o in self.outcomes for s in o.seconds.values())
        return max(ends, default=self._begun) - self._begun

    @property
    def _begun(self) -> float:
        return self.outcomes[0].begun

    def _parts(self) -> Iterator[str]:
        failures = [
            _html_report.problem(text)
            for number, outcome in enumerate(self.outcomes)
            for text in _failure(number, outcome)
        ]
        if failures:
            yield _html_report.section("Failures", *failures)
        lanes = self._lanes()
        more = len(lanes) - _MOST_LANES
        shown = "" if more <= 0 else f", the first {_MOST_LANES}"
        chart = timeline("", lanes[:_MOST_LANES])
        yield _html_report.section(f"Processes over time{shown}", chart)
        rows = [
            row for i, each in enumerate(self.outcomes) for row in self._rows(i, each)
        ]
        table = _html_report.table(_HEADER, rows, most_rows=_MOST_ROWS)
        yield _html_report.section("How each process ended", table)

    def _lanes(self) -> Sequence[TimelineLane]:
        spans: dict[int, list[TimelineSpan]] = {}
        for number, outcome in enumerate(self.outcomes):
            for rank, seconds in outcome.seconds.items():
                colour, end = _end(outcome, rank)
                span = TimelineSpan(
                    outcome.begun,
                    outcome.begun + seconds,
                    _MEANINGS[colour],
                    colour,
                    f"attempt {number}, {end}",
                )
                spans.setdefault(rank, []).append(span)
        return [
            TimelineLane(f"rank {rank}", tuple(spans[rank])) for rank in sorted(spans)
        ]

    def _rows(self, number: int, outcome: Outcome) -> Iterator[Row]:
        began = with_seconds(outcome.begun - self._begun) if number else "0 s"
        for rank in sorted(outcome.seconds):
            lasted = with_seconds(outcome.seconds[rank])
            yield number, rank, began, lasted, _end(outcome, rank)[1]


def _end(outcome: Outcome, rank: int) -> tuple[Colour, str]:
    """The end of a process: what colour it has, and in words."""
    if rank in outcome.killed:
        return Colour.IDLE, "killed by the launcher"
    code = next(end.code for end in outcome.ended if end.rank == rank)
    how = "exit code 0" if code == 0 else described(code)
    if outcome.cause is not None and outcome.cause.rank == rank:
        return Colour.PROBLEM, how
    good = outcome.is_good(code)
    return (Colour.COMPUTE if good else Colour.IDLE), how


def _failure(number: int, outcome: Outcome) -> Iterator[str]:
    """Why an attempt failed, with the last lines of who failed first."""
    if outcome.asked is not None:
        yield f"Attempt {number} was stopped by {signal_name(outcome.asked)}."
    if (cause := outcome.cause) is None:
        return
    lines = [
        f"Attempt {number}: rank {cause.rank} failed with {described(cause.code)}."
    ]
    tail = outcome.tails.get(cause.rank, ())
    lines += (line.decode(errors="replace") for line in tail)
    yield "\n".join((*lines, *outcome.late))
