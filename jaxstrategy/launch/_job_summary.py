"""What became of a job, as text: `job_summary`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxstrategy.launch._attempt import Outcome
from jaxstrategy.launch._exit_meanings import described, signal_name
from jaxstrategy.text._units import with_noun, with_seconds

_HEADER = ("attempt", "rank", "began after", "ran for", "end")
_MOST_ROWS = 64


def job_summary(name: str, outcomes: Sequence[Outcome], code: int) -> str:
    """The attempts of a job, why some failed, and how each process ended."""
    begun = outcomes[0].begun
    ends = [each.begun + s for each in outcomes for s in each.seconds.values()]
    how = "ended well" if code == 0 else f"ended with exit code {code}"
    attempts = with_noun(len(outcomes), "attempt")
    lasted = with_seconds(max(ends, default=begun) - begun)
    failures = [text for i, each in enumerate(outcomes) for text in _failure(i, each)]
    rows = [row for i, each in enumerate(outcomes) for row in _rows(i, each, begun)]
    more = len(rows) - _MOST_ROWS
    shown = [_HEADER, *rows[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(_HEADER))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in shown
    ]
    parts = [f"{name} {how} after {attempts}, {lasted}", *failures]
    parts += ["\n".join(line.rstrip() for line in table)]
    parts += [f"and {with_noun(more, 'other process')}"] if more > 0 else []
    return "\n\n".join(parts) + "\n"


def _rows(number: int, outcome: Outcome, begun: float) -> Iterator[tuple[str, ...]]:
    began = with_seconds(outcome.begun - begun) if number else "0 s"
    for rank in sorted(outcome.seconds):
        end = "killed by the launcher"
        if rank not in outcome.killed:
            end = next(described(e.code) for e in outcome.ended if e.rank == rank)
        yield str(number), str(rank), began, with_seconds(outcome.seconds[rank]), end


def _failure(number: int, outcome: Outcome) -> Iterator[str]:
    """Why an attempt failed, with the last lines of who failed first."""
    if outcome.asked is not None:
        yield f"Attempt {number} was stopped by {signal_name(outcome.asked)}."
    if (cause := outcome.cause) is None:
        return
    why = f"Attempt {number}: rank {cause.rank} failed with {described(cause.code)}."
    tail = outcome.tails.get(cause.rank, ())
    lines = [*(line.decode(errors="replace") for line in tail), *outcome.late]
    yield "\n  ".join((why, *lines))
