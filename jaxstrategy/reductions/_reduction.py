"""The reduction of what the replicas of a strategy hold: `Reduction`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final

import jax

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions._compressed import Owed, reduce_with_memory
from jaxstrategy.reductions._compression import Sums
from jaxstrategy.reductions._compression_state import compression_of
from jaxstrategy.reductions._gather import all_gather
from jaxstrategy.reductions._plan import AbstractPlan
from jaxstrategy.reductions._sparse import reduce_slices
from jaxstrategy.reductions._sums import Groups
from jaxstrategy.replicas import _overflow
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values._slices import IndexedSlices, is_slices
from jaxstrategy.values._types import Leaf


@final
class Reduction:
    """The one way in which replicas combine what each of them has, inside a step.

    Args:
      replicas: whose values they are.
      plan: what is done with them.
    """

    def __init__(self, replicas: Replicas, plan: AbstractPlan) -> None:
        self._replicas = replicas
        self._plan = plan

    def reduce_leaves(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        options: CommunicationOptions | None = None,
        groups: Groups | None = None,
    ) -> list[Leaf]:
        """This replica's arrays reduced over all replicas, or over its group.

        Args:
          op: what is done with the replicas' versions of a leaf.
          leaves: arrays, numbers and `IndexedSlices`, which stay sparse.
          options: how, instead of as planned.
          groups: replica ids in groups of one size.

        Raises:
          TypeError: a leaf is not a number, or has no such reduction.
          ValueError: `IndexedSlices` in groups or with an extreme.
        """
        plan = self._plan.with_options(options, self._replicas).within(groups)
        dense = [leaf for leaf in leaves if not is_slices(leaf)]
        sparse = [self._sparse(op, x, groups) for x in leaves if is_slices(x)]
        reduced, joined = iter(self._dense(plan, op, dense)), iter(sparse)
        return [next(joined if is_slices(leaf) else reduced) for leaf in leaves]

    def alone(self) -> Reduction:
        """The same, but that arrays are not joined unless somebody chose how."""
        return Reduction(self._replicas, self._plan.alone())

    def _dense(
        self, plan: AbstractPlan, op: ReduceOp, leaves: Sequence[Leaf]
    ) -> list[Leaf]:
        axes = self._replicas.collective_axes
        alone = [self._goes_alone(leaf) for leaf in leaves]
        packed = [x for x, is_alone in zip(leaves, alone, strict=True) if not is_alone]
        together = iter(plan.reduce(op, packed, axes))
        return [
            plan.reduce(op, [leaf], axes)[0] if is_alone else next(together)
            for leaf, is_alone in zip(leaves, alone, strict=True)
        ]

    def _goes_alone(self, leaf: Leaf) -> bool:
        """Whether an array is not to be joined with others.

        Of those that are, no replica could take its part, and each device of a replica
        would have all.
        """
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            return False
        replicas = self._replicas
        return replicas.is_divisible(leaf) or replicas.may_lie_inside(leaf.shape)

    def reduce_compressed(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        owed: Sequence[Owed | None],
        options: CommunicationOptions,
    ) -> tuple[list[Leaf], list[Owed | None]]:
        """This replica's arrays reduced over all replicas, some of them compressed.

        Args:
          op: a sum.
          leaves: arrays, numbers and `IndexedSlices`, which stay sparse.
          owed: what is owed of each leaf that is compressed; None for others.
          options: with a compression.

        Returns:
          The results, and what is owed now.

        Raises:
          ValueError: `op` is no sum, or the plan has sums of its own.
          TypeError: a leaf is not a number, or has no such reduction.
          NotImplementedError: the result is differentiated.
        """
        plan = self._plan.with_options(options, self._replicas)
        axes = self._replicas.collective_axes
        dense = [i for i, leaf in enumerate(leaves) if not is_slices(leaf)]
        reduced, settled = reduce_with_memory(
            op,
            [leaves[i] for i in dense],
            [owed[i] for i in dense],
            compression_of(options),
            Sums(
                functools.partial(self._dense, plan, op),
                functools.partial(plan.in_eight_bits, op, axes=axes),
            ),
            is_alone=self._replicas.count == 1,
        )
        # What is sparse owes what it owed.
        results = {
            i: self._sparse(op, x, None) for i, x in enumerate(leaves) if is_slices(x)
        }
        results.update(zip(dense, reduced, strict=True))
        debts = {**dict(enumerate(owed)), **dict(zip(dense, settled, strict=True))}
        places = range(len(leaves))
        return [results[i] for i in places], [debts[i] for i in places]

    def _sparse(
        self, op: ReduceOp, leaf: IndexedSlices, groups: Groups | None
    ) -> IndexedSlices:
        if groups is not None:
            raise ValueError(
                "`groups` was given for IndexedSlices, whose rows go to all replicas. "
                "Reduce `slices.to_dense()` instead."
            )
        return reduce_slices(op, leaf, self._replicas)

    def gathered(self, leaf: Leaf, axis: int) -> jax.Array:
        """Every replica's array, joined along `axis` in replica order.

        Shapes: local `[n, ...]` -> `[num_replicas * n, ...]` for `axis=0`.

        Raises:
          ValueError: a scalar, or `axis` is out of range.
          TypeError: `axis` is not a whole number.
        """
        return all_gather(leaf, axis, self._replicas)

    def first(self, leaf: Leaf) -> jax.Array:
        """The array of the first replica on all of them, in its own shape."""
        return self.gathered(_overflow.array_of(leaf)[None], 0)[0]
