"""What an explanation says of divided state: `ExplainedSharding` and its parts."""

from __future__ import annotations

import dataclasses
from typing import final

from jaxstrategy.replicas._inner_placement import WHOLE, InnerSpec
from jaxstrategy.text._user_code import Line
from jaxstrategy.tracing.explanation._facts import ExplainedCollective


@final
@dataclasses.dataclass(frozen=True)
class ExplainedLeaf:
    """An array that is equal on all replicas, and the part of it that each keeps.

    Attributes:
      path: how the user would write it, such as `"state.params['kernel']"`.
      shape: of all of it.
      dtype: of its elements.
      nbytes: of all of it.
      device_bytes: of what lies on one device.
      dimension: along which it is divided over the replicas; None if it is whole.
      reason: why it is whole, in words; empty if it is divided.
      inner: how the devices of each replica divide it over the logical axes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device_bytes: int
    dimension: int | None
    reason: str
    inner: InnerSpec = WHOLE


@final
@dataclasses.dataclass(frozen=True)
class WholeSum:
    """A large sum over the replicas of which each gets all, not its part only.

    Attributes:
      shape: of the sum.
      dtype: of its elements.
      nbytes: of all of it.
      line: the user's line that sums, None if JAX did not keep it.
      reason: why each replica gets all of it, in words.
      reader: the user's line that is the reason, if one is.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    line: Line | None
    reason: str
    reader: Line | None = None


@final
@dataclasses.dataclass(frozen=True)
class UndecidedOperation:
    """An operation on divided arrays for which XLA alone chooses what it exchanges.

    Such are matrix products in an optimizer. What they exchange is not among the
    collectives of an explanation.

    Attributes:
      operation: JAX's name for it, such as `"dot_general"`.
      count: how many of them this line makes.
      line: the user's line that made it, None if JAX did not keep it.
    """

    operation: str
    count: int
    line: Line | None


@final
@dataclasses.dataclass(frozen=True)
class ExplainedSharding:
    """The state of a step that may be divided, and what that costs.

    Attributes:
      shard: what the strategy divides: `"state"` or `"optimizer"`; None if it divides
        nothing by itself, but for variables.
      num_replicas: over how many replicas.
      leaves: all arguments and variables that are equal on all replicas, divided ones
        and whole ones.
      results: likewise, of the results; one that XLA may place counts as if each device
        of a replica had all of it.
      collectives: those that are there because state is divided; `collectives` of the
        `Explanation` has them and all others.
      whole_sums: the large sums that are not divided.
      undecided: what may exchange more.
    """

    shard: str | None
    num_replicas: int
    leaves: tuple[ExplainedLeaf, ...]
    results: tuple[ExplainedLeaf, ...]
    collectives: tuple[ExplainedCollective, ...]
    whole_sums: tuple[WholeSum, ...]
    undecided: tuple[UndecidedOperation, ...]

    @property
    def divided(self) -> tuple[ExplainedLeaf, ...]:
        """The arguments and variables of which each replica keeps a part."""
        return tuple(leaf for leaf in self.leaves if leaf.dimension is not None)

    @property
    def whole(self) -> tuple[ExplainedLeaf, ...]:
        """The arguments and variables of which each replica keeps all."""
        return tuple(leaf for leaf in self.leaves if leaf.dimension is None)

    @property
    def state_bytes(self) -> int:
        """The bytes of arguments and variables on one device, between steps."""
        return sum(leaf.device_bytes for leaf in self.leaves)

    @property
    def replicated_bytes(self) -> int:
        """The same if every replica kept all of them."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def gathered_bytes(self) -> int:
        """The bytes of the whole arrays that a step gathers, each time that it does."""
        return self.num_replicas * self._bytes("all_gather")

    @property
    def scattered_bytes(self) -> int:
        """The bytes of the whole sums of which a step gives each replica its part."""
        return self._bytes("reduce_scatter")

    def _bytes(self, kind: str) -> int:
        return sum(
            found.least_times * found.nbytes
            for found in self.collectives
            if found.kind == kind
        )
