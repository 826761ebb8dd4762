"""The times at which processes come to steps: which are late, and by how much."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import final

from jaxstrategy._src.cluster.resolvers.environment import LATE
from jaxstrategy._src.processes.rendezvous import Member
from jaxstrategy._src.processes.store import ProcessState

# What a process tells each second; the last steps are enough to see who is late.
_KEPT = 256
_SHARE = 0.1  # of a step; a process that is late by less is not called late
_FEWEST = 10  # steps


@final
class Arrivals:
    """The arrivals of this process at its last steps.

    Attributes:
      arrived: called with the number of a step and `time.monotonic()`, as a pair, when
        this process has come to it.
    """

    def __init__(self) -> None:
        self._steps = collections.deque[tuple[int, float]](maxlen=_KEPT)
        self._barriers = collections.deque[tuple[int, float]](maxlen=_KEPT)
        self._count = 0
        self.arrived = self._steps.append  # nothing more at each step

    def passed_barrier(self) -> None:
        """All processes have compared a step, this moment."""
        self._count += 1
        self._barriers.append((self._count, time.monotonic()))

    def told(self) -> list[tuple[int, int, float]]:
        """The last steps: their number, that of the barrier before, seconds since.

        Those before the first barrier are left out: the processes have no moment in
        common there.
        """
        barriers = list(self._barriers)
        moments = [moment for _, moment in barriers]
        rows = []
        for step, moment in list(self._steps):
            if before := bisect.bisect_left(moments, moment):
                number, passed = barriers[before - 1]
                rows.append((step, number, round(moment - passed, 6)))
        return rows


@final
@dataclasses.dataclass(frozen=True)
class Lateness:
    """The lateness of a process at steps, after the first that comes.

    Attributes:
      member: the process.
      median: of its lateness, in seconds.
      tail: what 95 % of the steps stay below, in seconds.
    """

    member: Member
    median: float
    tail: float


@final
@dataclasses.dataclass(frozen=True)
class Stragglers:
    """The lateness of each process of a job. Prints as a table.

    Attributes:
      processes: how late each is, by their ids.
      steps: how many steps it was seen at, the last ones.
      step_seconds: how long a step takes, in the median.

    >>> import jaxstrategy as js
    >>> found = js.experimental.stragglers()  # of one process: nobody is late
    >>> found.slowest is None, len(found.processes)
    (True, 0)
    """

    processes: tuple[Lateness, ...]
    steps: int
    step_seconds: float

    @property
    def slowest(self) -> Lateness | None:
        """The process whose median lateness exceeds a tenth of a step, or None."""
        if not self.processes or not self._is_enough:
            return None
        last = max(self.processes, key=lambda process: process.median)
        return last if last.median > _SHARE * self.step_seconds else None

    @property
    def _is_enough(self) -> bool:
        """Whether there were enough steps, and two in a row, to compare with."""
        return self.steps >= _FEWEST and self.step_seconds > 0

    @property
    def verdict(self) -> str:
        """The finding in a sentence."""
        if not self._is_enough:
            seen = "step was" if self.steps == 1 else "steps were"
            return f"only {self.steps} {seen} seen, too few to tell who is late"
        if (late := self.slowest) is None:
            return f"no process is late, in {self.steps} steps"
        share = late.median / self.step_seconds
        return (
            f"{late.member} is late: it comes {1e3 * late.median:.1f} ms after the "
            f"first to a step (95 %: {1e3 * late.tail:.1f} ms), {share:.0%} of a step"
        )

    def __str__(self) -> str:
        rows = [
            f"  {each.member}: median {1e3 * each.median:.1f} ms, 95 % "
            f"{1e3 * each.tail:.1f} ms"
            for each in self.processes
        ]
        return "\n".join([self.verdict, *rows])


def stragglers(told: Mapping[Member, Sequence[Sequence[float]]]) -> Stragglers:
    """Find the late processes."""
    known = [
        {(int(s), int(barrier)): at for s, barrier, at in rows}
        for rows in told.values()
    ]
    common = sorted(set.intersection(*map(set, known))) if known else []
    late: list[list[float]] = [[] for _ in known]
    for key in common:
        first = min(rows[key] for rows in known)
        for own, rows in zip(late, known, strict=True):
            own.append(rows[key] - first)
    lasts = {key: max(rows[key] for rows in known) for key in common}
    seconds = []  # from each step to the next
    for (step, barrier), following in itertools.pairwise(common):
        if following == (step + 1, barrier):
            seconds.append(lasts[following] - lasts[step, barrier])
        elif following == (step + 1, barrier + 1):
            # All have compared the earlier step when its last process had come to it.
            seconds.append(lasts[following])
    processes = []
    for member, own in zip(told, late, strict=True):
        if own:
            tail = sorted(own)[min(len(own) - 1, int(0.95 * len(own)))]
            processes.append(Lateness(member, statistics.median(own), tail))
    step_seconds = statistics.median(seconds) if seconds else 0.0
    return Stragglers(tuple(processes), len(common), step_seconds)


def at_the_end(states: Sequence[ProcessState]) -> str:
    """The line by which a process says at its end who was late; empty if nobody."""
    found = of_states(states)
    return "" if found.slowest is None else f"{LATE}{found.verdict}\n"


def of_states(states: Sequence[ProcessState]) -> Stragglers:
    """Find the late processes by the states on the store."""
    return stragglers(
        {s.member: s.status["arrivals"] if s.status else () for s in states}
    )
