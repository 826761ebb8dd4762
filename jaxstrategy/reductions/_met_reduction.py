"""Reductions of a replica that runs eagerly: `MetReduction`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import jax

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions._compressed import Owed
from jaxstrategy.reductions._met_collectives import (
    Gathered,
    MetCollective,
    OfFirst,
    Reduced,
    ReducedCompressed,
)
from jaxstrategy.reductions._sums import Groups
from jaxstrategy.replicas import _overflow
from jaxstrategy.values._types import Leaf, PyTree

Meet = Callable[[MetCollective, Sequence[jax.Array]], PyTree]
"""A collective with the arrays of this replica: what comes of them."""


@final
class MetReduction:
    """Reductions for which the replicas meet; in each the arrays are its own.

    Args:
      meet: takes part in a collective.
    """

    def __init__(self, meet: Meet) -> None:
        self._meet = meet

    def alone(self) -> MetReduction:
        """As that of `Reduction`: replicas that run eagerly join no arrays."""
        return self

    def reduce_leaves(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        options: CommunicationOptions | None = None,
        groups: Groups | None = None,
    ) -> list[Leaf]:
        """As that of `Reduction`."""
        arrays, structure = jax.tree.flatten(list(leaves))
        return self._met(Reduced(op, options, groups, structure), arrays)

    def reduce_compressed(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        owed: Sequence[Owed | None],
        options: CommunicationOptions,
    ) -> tuple[list[Leaf], list[Owed | None]]:
        """As that of `Reduction`."""
        pairs = [None if each is None else (each.error, each.basis) for each in owed]
        arrays, structure = jax.tree.flatten((list(leaves), pairs))
        collective = ReducedCompressed(op, options, structure)
        reduced, debts = self._met(collective, arrays)
        return reduced, [None if pair is None else Owed(*pair) for pair in debts]

    def gathered(self, leaf: Leaf, axis: int) -> jax.Array:
        """As that of `Reduction`.

        Shapes: `[n, ...]` -> `[num_replicas * n, ...]` for `axis=0`.
        """
        return self._met(Gathered(axis), [leaf])[0]

    def first(self, leaf: Leaf) -> jax.Array:
        """As that of `Reduction`: the first replica's, of the same shape."""
        return self._met(OfFirst(), [leaf])[0]

    def _met(self, collective: MetCollective, arrays: Sequence[Leaf]) -> PyTree:
        # Most leaves of strings and other objects come to an end here.
        return self._meet(collective, [_overflow.array_of(array) for array in arrays])
