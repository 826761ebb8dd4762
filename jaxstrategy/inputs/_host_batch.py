"""The batch of one step, before it goes to the devices: `HostBatch`."""

from __future__ import annotations

import dataclasses
from typing import Any, final

from jaxstrategy.inputs import _division
from jaxstrategy.inputs.sources._source import State


@final
@dataclasses.dataclass(frozen=True)
class HostBatch:
    """This process's part of the batch of one step, on the host.

    Attributes:
      arrays: `[local replica, each, ...]`, filled up.
      own_counts: how many real rows each of this process's replicas has.
      each: how many rows each replica has, real or not.
      are_own: whether nobody else has the arrays.
      counts: how many real rows each of all replicas has; none until the processes
        have agreed about the step.
      state: where the pass is after this step, for `set_state`; or why it has none.
      is_padded: whether this step, or another one of the pass, may be filled up.
    """

    arrays: list[Any]
    own_counts: tuple[int, ...]
    each: int
    are_own: bool = False
    counts: tuple[int, ...] = ()
    state: State | TypeError = None
    is_padded: bool = True

    @property
    def is_full(self) -> bool:
        """Whether no row is missing."""
        return min(self.counts) >= self.each  # one replica may have more

    def copied(self) -> HostBatch:
        """The same in arrays of its own."""
        if self.are_own:
            return self
        return dataclasses.replace(self, arrays=_division.copied(self.arrays))
