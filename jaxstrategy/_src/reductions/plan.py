"""The plan of a reduction of many arrays per replica, made once per strategy."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxstrategy._src.options import (
    CommunicationImplementation as Implementation,
    CommunicationOptions,
    ReduceOp,
)
from jaxstrategy._src.reductions import compression, operations
from jaxstrategy._src.reductions.operations import (
    OPERATIONS,
    Axes,
    Groups,
    Sum,
    checked,
    chosen_groups,
)
from jaxstrategy._src.reductions.packing import (
    AbstractPacking,
    NumberOfPacks,
    Packing,
    in_packs,
    pairs_in_packs,
)
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.values.arrays import Leaf


class AbstractPlan(abc.ABC):
    """A reduction, decided before a step is traced."""

    @abc.abstractmethod
    def with_options(
        self, options: CommunicationOptions | None, replicas: Replicas
    ) -> Self:
        """The same, but for what `options` say.

        Raises:
          ValueError: they name groups that are not of these replicas.
        """

    @abc.abstractmethod
    def within(self, groups: Groups | None) -> Self:
        """The same, but over the replicas of each group.

        Raises:
          ValueError: it reduces over all replicas only.
        """

    @abc.abstractmethod
    def alone(self) -> Self:
        """The same, but that arrays are not joined unless somebody chose how."""

    @abc.abstractmethod
    def reduce(self, op: ReduceOp, values: Sequence[Leaf], axes: Axes) -> list[Leaf]:
        """Each of `values` reduced over all replicas; every replica gets the results.

        Raises:
          TypeError: a dtype cannot be reduced with `op`.
        """

    @abc.abstractmethod
    def in_eight_bits(
        self, op: ReduceOp, arrays: Sequence[jax.Array], axes: Axes
    ) -> list[tuple[jax.Array, jax.Array]]:
        """The sum or mean of each array of which numbers were sent in 8 bits.

        Args:
          op: SUM or MEAN.
          arrays: of floating-point numbers of 32 bits or more.
          axes: the mesh axes.

        Returns:
          For each array, `[...]`, the result and what of this replica's array is not
          in it, both of its shape.

        Raises:
          ValueError: it sums in a way of its own.
        """


@dataclasses.dataclass(frozen=True)
class Plan(AbstractPlan):
    """A reduction of the replicas' arrays by collectives.

    Attributes:
      packing: which arrays are joined first.
      sum: how arrays are summed.
      groups: sums and extremes are over the replicas of each group, if there are any.
      reduce_dtype: what floating-point numbers are summed in; None: their own, those of
        16 bits and less in float32.
      near: groups of replicas that are close to each other, if sums are made inside
        them first.
      is_packed_later: whether sums stand in a trace as equations in a row, whose arrays
        are joined when it is known in which order they are computed.
      is_packing_free: whether nobody chose the packing.
    """

    packing: AbstractPacking
    sum: Sum = operations.direct
    groups: Groups | None = None
    reduce_dtype: DTypeLike | None = None
    near: Groups | None = None
    is_packed_later: bool = False
    is_packing_free: bool = False

    def in_levels(self, groups: Groups) -> Plan:
        """The same, with sums inside these groups, between them, and back to all."""
        in_groups = functools.partial(operations.hierarchical, groups=groups)
        return dataclasses.replace(self, sum=in_groups, near=groups)

    def with_options(
        self, options: CommunicationOptions | None, replicas: Replicas
    ) -> Plan:
        """The same, but for what `options` say.

        Raises:
          ValueError: they name groups that are not of these replicas.
        """
        if options is None:
            return self
        plan = self
        if size := options.bytes_per_pack:
            plan = dataclasses.replace(
                plan,
                packing=Packing(size, size),
                is_packed_later=False,
                is_packing_free=False,
            )
        if options.overlap:
            plan = dataclasses.replace(plan, is_packed_later=True)
        if options.reduce_dtype is not None:
            plan = dataclasses.replace(plan, reduce_dtype=options.reduce_dtype)
        if options.implementation is Implementation.RING:
            plan = dataclasses.replace(plan, sum=operations.ring, near=None)
        if options.implementation is Implementation.NCCL:
            plan = dataclasses.replace(plan, sum=operations.direct, near=None)
        if options.implementation is Implementation.HIERARCHICAL:
            plan = plan.in_levels(chosen_groups(options.groups, replicas))
        if options.deterministic:
            plan = dataclasses.replace(
                plan, sum=operations.in_replica_order, near=None, is_packed_later=False
            )
        return plan

    def alone(self) -> Plan:
        """The same, but that arrays are not joined unless somebody chose how."""
        if not self.is_packing_free:
            return self
        return dataclasses.replace(self, packing=NumberOfPacks(0))

    def reduce(self, op: ReduceOp, values: Sequence[Leaf], axes: Axes) -> list[Leaf]:
        """Each of `values` reduced over all replicas; every replica gets the results.

        SUM, MIN and MAX keep each dtype (so small integers wrap in a sum as they do in
        NumPy); MEAN of integers has JAX's default float dtype. With no axes there is
        one replica, and the values stay what they are.

        Raises:
          TypeError: a dtype cannot be reduced with `op`.
        """
        row = OPERATIONS[op]
        arrays = [row.prepared(checked(op, value)) for value in values]
        if not axes:
            return arrays
        if any(array.size == 0 for array in arrays):
            return self._beside_empty(op, arrays, axes)
        if not row.is_sum:
            return in_packs(
                lambda x: row.across(x, axes, self.groups), arrays, self.packing
            )
        divisor = self._members(axes) if row.divides else 1
        wide = [array.astype(self._dtype_for(array)) for array in arrays]
        if self.is_packed_later and self.sum is operations.direct:
            sums = operations.all_direct(wide, axes, divisor)
        else:
            sums = in_packs(
                lambda x: operations.unfolded(
                    self.sum(operations.unfolded(x), axes, divisor)
                ),
                wide,
                self.packing,
            )
        return [
            done.astype(array.dtype) for done, array in zip(sums, arrays, strict=True)
        ]

    def _beside_empty(
        self, op: ReduceOp, arrays: Sequence[jax.Array], axes: Axes
    ) -> list[Leaf]:
        """The results, in which arrays without elements are what they were.

        They are equal on all replicas; zeros do not vary to the analysis of a step.
        """
        reduced = iter(self.reduce(op, [x for x in arrays if x.size], axes))
        return [next(reduced) if x.size else jnp.zeros_like(x) for x in arrays]

    def in_eight_bits(
        self, op: ReduceOp, arrays: Sequence[jax.Array], axes: Axes
    ) -> list[tuple[jax.Array, jax.Array]]:
        """The sum or mean of each array of which numbers were sent in 8 bits.

        Two arrays for each, of its shape: see `AbstractPlan`.

        Raises:
          ValueError: the sum is one that gets arrays whole.
        """
        if self.near is None and self.sum not in (operations.direct, operations.ring):
            raise ValueError(
                "`compression='int8'` was given, but this strategy's cross-device "
                "operations add up whole arrays. Use the default ones, "
                "`NcclAllReduce` or `HierarchicalCopyAllReduce`."
            )
        divisor = lax.axis_size(axes) if OPERATIONS[op].divides else 1
        summed = functools.partial(
            compression.summed, axes=axes, divisor=divisor, near=self.near
        )
        return pairs_in_packs(summed, arrays, self.packing)

    def within(self, groups: Groups | None) -> Plan:
        """The same, but over the replicas of each group."""
        if groups is None or len(groups) == 1:  # one group is all replicas
            return self
        is_ordered = self.sum is operations.in_replica_order
        way = operations.in_replica_order if is_ordered else operations.grouped
        sum_ = functools.partial(way, groups=groups)
        return dataclasses.replace(self, sum=sum_, groups=groups)

    def _members(self, axes: Axes) -> int:
        return lax.axis_size(axes) if self.groups is None else len(self.groups[0])

    def _dtype_for(self, array: jax.Array) -> DTypeLike:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array.dtype
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        return jnp.float32 if array.dtype.itemsize <= 2 else array.dtype
