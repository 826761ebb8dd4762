"""How often something happened, and how long it took: `Durations`, `Stopwatch`."""

from __future__ import annotations

import dataclasses
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

    def with_another(self, seconds: float) -> Durations:
        """These and one more."""
        shortest = min(self.min, seconds) if self.count else seconds
        longest = max(self.max, seconds)
        return Durations(self.count + 1, shortest, longest, self.sum + seconds)

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
        self._durations = Durations()

    def add(self, seconds: float) -> None:
        """One more."""
        with self._lock:
            self._durations = self._durations.with_another(seconds)

    @property
    def durations(self) -> Durations:
        """Those up to now."""
        return self._durations
