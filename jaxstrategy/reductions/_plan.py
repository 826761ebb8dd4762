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

from jaxstrategy._options import CommunicationImplementation as Implementation
from jaxstrategy._options import CommunicationOptions, ReduceOp
from jaxstrategy.reductions import _sums
from jaxstrategy.reductions._packing import AbstractPacking, Packing, in_packs
from jaxstrategy.reductions._reduce_operations import (
    OPERATIONS,
    checked,
)
from jaxstrategy.reductions._sums import Axes, Groups, Sum
from jaxstrategy.values._types import Leaf


class AbstractPlan(abc.ABC):
    """A reduction, decided before a step is traced."""

    @abc.abstractmethod
    def with_options(self, options: CommunicationOptions | None) -> Self:
        """The same, but for what `options` say."""

    @abc.abstractmethod
    def within(self, groups: Groups | None) -> Self:
        """The same, but over the replicas of each group.

        Raises:
          ValueError: it reduces over all replicas only.
        """

    @abc.abstractmethod
    def reduce(self, op: ReduceOp, values: Sequence[Leaf], axes: Axes) -> list[Leaf]:
        """Each of `values` reduced over all replicas; every replica gets the results.

        Raises:
          TypeError: a dtype cannot be reduced with `op`.
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
    """

    packing: AbstractPacking
    sum: Sum = _sums.direct
    groups: Groups | None = None
    reduce_dtype: DTypeLike | None = None

    def with_options(self, options: CommunicationOptions | None) -> Plan:
        """The same, but for what `options` say."""
        if options is None:
            return self
        plan = self
        if size := options.bytes_per_pack:
            plan = dataclasses.replace(plan, packing=Packing(size, size))
        if options.reduce_dtype is not None:
            plan = dataclasses.replace(plan, reduce_dtype=options.reduce_dtype)
        if options.implementation is Implementation.RING:
            plan = dataclasses.replace(plan, sum=_sums.ring)
        if options.implementation is Implementation.NCCL:
            plan = dataclasses.replace(plan, sum=_sums.direct)
        return plan

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
        sums = in_packs(
            lambda x: _unfolded(self.sum(_unfolded(x), axes, divisor)),
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

    def within(self, groups: Groups | None) -> Plan:
        """The same, but over the replicas of each group."""
        if groups is None or len(groups) == 1:  # one group is all replicas
            return self
        sum_ = functools.partial(_sums.grouped, groups=groups)
        return dataclasses.replace(self, sum=sum_, groups=groups)

    def _members(self, axes: Axes) -> int:
        return lax.axis_size(axes) if self.groups is None else len(self.groups[0])

    def _dtype_for(self, array: jax.Array) -> DTypeLike:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array.dtype
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        return jnp.float32 if array.dtype.itemsize <= 2 else array.dtype


def _unfolded(array: jax.Array) -> jax.Array:
    """`array`, with nothing known of it while it is compiled if it is complex.

    XLA computes the sum over replicas of a constant while it compiles, and ends the
    process if that is complex (jaxlib 0.10.2 to 0.12). A sum of no rows is a constant,
    as is the gradient of a sum; so results need this, too.
    """
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return lax.optimization_barrier(array) if is_complex else array
