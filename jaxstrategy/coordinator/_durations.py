"""How often something happened, and how long it took: `Durations`, `Stopwatch`."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import final

from jaxstrategy.text._units import with_seconds


@final
@dataclasses.dataclass(frozen=True)
class Durations:
    """Times in seconds.

    Attributes:
      count: how many there were.
      min: the shortest; 0.0 of none.
      max: the longest; 0.0 of none.
      sum: of all.

    >>> import jaxstrategy as js
    >>> js.coordinator.Durations(2, 0.5, 1.5, 2.0).mean
    1.0
    """

    count: int = 0
    min: float = 0.0
    max: float = 0.0
    sum: float = 0.0

    @property
    def mean(self) -> float:
        """The mean; 0.0 of none."""
        return self.sum / self.count if self.count else 0.0

    def __str__(self) -> str:
        if not self.count:
            return "0"
        return (
            f"{self.count} of {with_seconds(self.mean)} "
            f"({with_seconds(self.min)} to {with_seconds(self.max)})"
        )


@final
class Stopwatch:
    """Adds up durations, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._sum = 0, 0.0
        self._min, self._max = math.inf, 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        with self._lock:
            self._count += 1
            self._sum += seconds
            self._min = min(self._min, seconds)
            self._max = max(self._max, seconds)

    @property
    def durations(self) -> Durations:
        """Those up to now."""
        with self._lock:
            shortest = self._min if self._count else 0.0
            return Durations(self._count, shortest, self._max, self._sum)
