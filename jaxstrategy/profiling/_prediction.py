"""The time that the collectives of a call should take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxstrategy.executors._replicated_function import ReplicatedFunction
from jaxstrategy.profiling import _links
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.replicas._topology import Topology
from jaxstrategy.tracing.explanation._explanation import Explanation
from jaxstrategy.values._types import Function, Leaf


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The collectives of a step that the analysis finds, over given or measured links.

    Attributes:
      step: what is called; of what `@strategy.run` did not make, nothing is known.
      explain: explains a step, given its arguments.
      replicas: those of its strategy.
      topology: their links; by default they are measured.
    """

    step: Function
    explain: Callable[..., Explanation]
    replicas: Replicas
    topology: Topology | None = None

    def __call__(self, args: tuple[Leaf, ...], kwargs: dict[str, Leaf]) -> float | None:
        if not isinstance(self.step, ReplicatedFunction):
            return None
        found = self.explain(self.step, args, kwargs, compiled=False)
        if not found.collectives:
            return 0.0
        if self.topology is not None:
            return found.communication_time(self.topology)
        # The links were measured as those of a ring.
        return found.communication_time(_links.measured(self.replicas), "ring")
