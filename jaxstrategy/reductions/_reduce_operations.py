"""The arithmetic of each `ReduceOp`: one row in one table.

Gradients are local: the gradient of a sum over replicas is the sum over replicas of the
incoming gradients, of a mean their mean (as in TensorFlow's `all_reduce`). A minimum or
maximum passes the summed gradient to the replicas that hold it, in equal parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions._sums import Axes, Groups
from jaxstrategy.replicas import _overflow
from jaxstrategy.values._slices import is_slices
from jaxstrategy.values._types import Leaf


@dataclasses.dataclass(frozen=True)
class ReduceOperation:
    """One row: everything that differs between reduce operations.

    Attributes:
      locally: reduces an array over dimensions of its own.
      extreme: the collective that reduces over replicas; None where arrays are summed,
        which a `Plan` has several ways to do.
      divides: whether the sum is divided by the number of what was added.
      takes_bool: whether Booleans can be reduced.
      takes_complex: whether complex numbers can be.
    """

    locally: Callable[[jax.Array, tuple[int, ...]], jax.Array]
    extreme: Callable[..., jax.Array] | None = None
    divides: bool = False
    takes_bool: bool = False
    takes_complex: bool = True

    @property
    def is_sum(self) -> bool:
        """Whether zeros change nothing, so that rows may be left out or weighted."""
        return self.extreme is None

    def of_equal(self, array: jax.Array, count: int) -> jax.Array:
        """The result if so many replicas had `array`, of its shape."""
        adds_up = self.is_sum and not self.divides
        return array * jnp.asarray(count).astype(array.dtype) if adds_up else array

    def prepared(self, array: jax.Array) -> jax.Array:
        """`array` of the dtype that is reduced."""
        # Before the sum, so that integers do not wrap on the way to their mean.
        is_kept = not self.divides or jnp.issubdtype(array.dtype, jnp.inexact)
        return array if is_kept else array.astype(float)

    def across(self, array: jax.Array, axes: Axes, groups: Groups | None) -> jax.Array:
        """The smallest or largest of the replicas' elements, or of each group's."""
        return _extreme(array, axes, self.extreme, groups)


def _sum(array: jax.Array, dimensions: tuple[int, ...]) -> jax.Array:
    return jnp.sum(array, dimensions, dtype=array.dtype)


def _extremes(
    locally: Callable[..., jax.Array], across: Callable[..., jax.Array]
) -> ReduceOperation:
    return ReduceOperation(locally, across, takes_bool=True, takes_complex=False)


OPERATIONS: Mapping[ReduceOp, ReduceOperation] = {
    ReduceOp.SUM: ReduceOperation(_sum),
    ReduceOp.MEAN: ReduceOperation(jnp.mean, divides=True),
    ReduceOp.MIN: _extremes(jnp.min, lax.pmin),
    ReduceOp.MAX: _extremes(jnp.max, lax.pmax),
}


def sums() -> str:
    """The operations that add, for messages."""
    return " and ".join(op.name for op, row in OPERATIONS.items() if row.is_sum)


def reduced_over(op: ReduceOp, value: Leaf, axis: Sequence[int]) -> jax.Array:
    """`value` reduced over its own dimensions `axis`.

    Raises:
      ValueError: `axis` is out of range for the value, or names a dimension twice.
      TypeError: the dtype cannot be reduced with `op`, or `value` is sparse.
    """
    if is_slices(value):
        raise TypeError(
            "IndexedSlices cannot be reduced along an axis. Use `axis=None`, or reduce "
            "`slices.to_dense()`."
        )
    array = checked(op, value)
    row = OPERATIONS[op]
    return row.locally(row.prepared(array), _dimensions(axis, array.ndim))


def checked(op: ReduceOp, value: Leaf) -> jax.Array:
    """`value` as an array that `op` can reduce.

    Raises:
      TypeError: it is not an array or number, or its dtype has no such reduction.
    """
    try:
        array = _overflow.array_of(value)
    except TypeError as error:
        raise TypeError(
            f"{op.name} of {value!r}: an array or a number was wanted, got "
            f"{type(value).__name__}."
        ) from error
    row = OPERATIONS[op]
    if jnp.issubdtype(array.dtype, jnp.number):
        if row.takes_complex or not jnp.issubdtype(array.dtype, jnp.complexfloating):
            return array
        advice = "Complex numbers have no order; reduce `jnp.abs(value)` instead."
    elif array.dtype == jnp.bool_:
        if row.takes_bool:
            return array
        advice = "Convert it first: `value.astype('int32')` counts the true ones."
    else:
        advice = "Only numbers can be reduced."
    raise TypeError(f"{op.name} of a {array.dtype} array is not defined. {advice}")


def _dimensions(axis: Sequence[int], rank: int) -> tuple[int, ...]:
    for dimension in axis:
        if not -rank <= dimension < rank:
            raise ValueError(
                f"`axis` is {dimension}, out of range for a value with {rank} "
                f"dimensions on each replica: use {-rank} to {rank - 1}, or None."
                if rank
                else f"`axis` is {dimension}, but every replica's value is a scalar: "
                "use `axis=None`."
            )
    positions = tuple(dimension % rank for dimension in axis)
    if len(set(positions)) < len(positions):
        raise ValueError(f"`axis` {tuple(axis)} names one dimension more than once.")
    return positions


# JAX differentiates neither `pmin` nor `pmax` (0.10 and 0.12).
@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extreme(
    array: jax.Array,
    axes: Axes,
    collective: Callable[..., jax.Array],
    groups: Groups | None,
) -> jax.Array:
    return collective(array, axes, axis_index_groups=groups)


# The analysis of a step knows a reduced value by this function's name.
@_extreme.defjvp
def _extreme_jvp(
    axes: Axes,
    collective: Callable[..., jax.Array],
    groups: Groups | None,
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    (array,), (tangent,) = primals, tangents
    extreme = _extreme(array, axes, collective, groups)
    holds_it = (array == extreme).astype(tangent.dtype)

    def total(of: jax.Array) -> jax.Array:
        return lax.psum(of, axes, axis_index_groups=groups)

    return extreme, total(holds_it * tangent) / total(holds_it)
