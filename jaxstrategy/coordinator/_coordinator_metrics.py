"""How much a coordinator has done: `CoordinatorMetrics`."""

from __future__ import annotations

import dataclasses
from typing import final

from jaxstrategy.coordinator._durations import Durations


@final
@dataclasses.dataclass(frozen=True)
class CoordinatorMetrics:
    """Counts and times of a coordinator, under TensorFlow's names.

    Attributes:
      function_tracing: how long functions were traced.
      closure_execution: how long scheduled functions took, from when a worker had them
        until it had sent their results.
      remote_value_fetch: how long it took until results were there, of those that were
        asked for; each counts once.
      queued_closures: how many functions wait for a worker.
      inflight_closures: how many run.

    >>> import jaxstrategy as js
    >>> times = js.coordinator.Durations
    >>> print(js.coordinator.CoordinatorMetrics(times(), times(2, 0.5, 1.5, 2.0)))
    function_tracing: 0
    closure_execution: 2 of 1 s (500 ms to 1.5 s)
    remote_value_fetch: 0
    queued_closures: 0
    inflight_closures: 0
    """

    function_tracing: Durations = Durations()
    closure_execution: Durations = Durations()
    remote_value_fetch: Durations = Durations()
    queued_closures: int = 0
    inflight_closures: int = 0

    def __str__(self) -> str:
        fields = (each.name for each in dataclasses.fields(self))
        return "\n".join(f"{name}: {getattr(self, name)}" for name in fields)
