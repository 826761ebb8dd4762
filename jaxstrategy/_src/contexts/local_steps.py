"""Steps that each replica takes by itself, while they are traced: `LocalSteps`."""

from __future__ import annotations

from typing import final

from jaxstrategy._src.reductions.reduction import OwnReduction
from jaxstrategy._src.values.handle import Handle

# What local steps are part of in profiles, and how checks find what they send.
LOCAL_SCOPE = "jaxstrategy.local_steps"


@final
class LocalSteps:
    """Steps in which each replica is by itself.

    Args:
      count: how many replicas there are.

    Attributes:
      reduction: what takes the place of the strategy's.
      assigned: the variables that the steps have assigned, by their `id`.
    """

    def __init__(self, count: int) -> None:
        self.reduction = OwnReduction(count)
        self.assigned: dict[int, Handle] = {}
