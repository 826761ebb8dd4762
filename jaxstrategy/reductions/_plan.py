"""Many arrays per replica to as many: a `Plan` says how."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy._options import CommunicationImplementation as Implementation
from jaxstrategy._options import CommunicationOptions, ReduceOp
from jaxstrategy.reductions import _sums
from jaxstrategy.reductions._all_reduce import (
    checked,
    empty,
    extreme,
    floating,
    unfolded,
)
from jaxstrategy.reductions._packing import AbstractPacking, Packing, in_packs
from jaxstrategy.reductions._sums import Axes, Groups, Sum


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the replicas' arrays are reduced.

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
    reduce_dtype: Any = None

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

    def reduce(self, op: ReduceOp, values: Sequence[Any], axes: Axes) -> list[Any]:
        """Each of `values` reduced over all replicas; every replica gets the results.

        SUM, MIN and MAX keep each dtype (so small integers wrap in a sum as they do in
        NumPy); MEAN of integers has JAX's default float dtype. With no axes there is
        one replica, and the values stay what they are.

        Raises:
          TypeError: a dtype cannot be reduced with `op`.
        """
        arrays = [checked(op, value) for value in values]
        if any(array.size == 0 for array in arrays):
            return self._without_empty(op, arrays, axes)
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return in_packs(
                lambda x: extreme(op, x, axes, self.groups), arrays, self.packing
            )
        if op is ReduceOp.MEAN:
            arrays = list(map(floating, arrays))
        if not axes:
            return arrays
        divisor = self._members(axes) if op is ReduceOp.MEAN else 1
        wide = [array.astype(self._dtype_for(array)) for array in arrays]
        sums = in_packs(
            lambda x: unfolded(self.sum(unfolded(x), axes, divisor)),
            wide,
            self.packing,
        )
        return [
            done.astype(array.dtype) for done, array in zip(sums, arrays, strict=True)
        ]

    def _without_empty(
        self, op: ReduceOp, arrays: Sequence[jax.Array], axes: Axes
    ) -> list[Any]:
        reduced = iter(self.reduce(op, [x for x in arrays if x.size], axes))
        return [next(reduced) if x.size else empty(op, x) for x in arrays]

    def within(self, groups: Groups | None) -> Plan:
        """The same, but over the replicas of each group."""
        if groups is None or len(groups) == 1:  # one group is all replicas
            return self
        sum_ = functools.partial(_sums.grouped, groups=groups)
        return dataclasses.replace(self, sum=sum_, groups=groups)

    def _members(self, axes: Axes) -> int:
        return lax.axis_size(axes) if self.groups is None else len(self.groups[0])

    def _dtype_for(self, array: jax.Array) -> Any:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array.dtype
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        return jnp.float32 if array.dtype.itemsize <= 2 else array.dtype
