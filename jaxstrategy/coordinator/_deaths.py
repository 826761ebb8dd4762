"""How often a worker was lost lately: `Deaths`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from jaxstrategy.text._units import with_seconds

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


@final
class Deaths:
    """Decides whether a worker is started again, and when.

    Args:
      limit: so many starts in a row without a finished function are tried after one.
      seconds: those that are longer ago do not count.
      clock: in seconds.
    """

    def __init__(
        self,
        limit: int,
        seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._times: list[float] = []

    def forget(self) -> None:
        """The worker has finished a function."""
        if self._times:
            self._times.clear()

    def add(self) -> None:
        """The worker was lost, or did not come up."""
        now = self._clock()
        self._times = [t for t in self._times if now - t < self._seconds] + [now]

    @property
    def are_too_many(self) -> bool:
        """Whether it is better not to start it again."""
        return len(self._times) > self._limit

    @property
    def pause(self) -> float:
        """How many seconds to wait before the next start: none after one death."""
        again = len(self._times) - 1
        return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**again) if again > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"{len(self._times)} times within {with_seconds(self._seconds)} without "
            "finishing a function in between"
        )
