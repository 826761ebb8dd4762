"""One array per replica to one array: sum, mean, smallest and largest.

Every function takes this replica's array and the names of the mesh axes to reduce
over; with no axes there is one replica and the value stays what it is.

Gradients are local: the gradient of a sum over replicas is the sum over replicas of the
incoming gradients, of a mean their mean (as in TensorFlow's `all_reduce`). A minimum or
maximum passes the summed gradient to the replicas that hold it, in equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy._options import ReduceOp
from jaxstrategy.replicas import _mesh
from jaxstrategy.values._slices import is_slices

Axes = tuple[str, ...]


def reduced_over(op: ReduceOp, value: Any, axis: Sequence[int]) -> jax.Array:
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
    dimensions = _dimensions(axis, array.ndim)
    match op:
        case ReduceOp.SUM:
            return jnp.sum(array, dimensions, dtype=array.dtype)
        case ReduceOp.MEAN:
            return jnp.mean(floating(array), dimensions)
        case ReduceOp.MIN:
            return jnp.min(array, dimensions)
        case ReduceOp.MAX:
            return jnp.max(array, dimensions)


def checked(op: ReduceOp, value: Any) -> jax.Array:
    """`value` as an array that `op` can reduce.

    Raises:
      TypeError: it is not an array or number, or its dtype has no such reduction.
    """
    try:
        array = _mesh.array_of(value)
    except TypeError as error:
        raise TypeError(
            f"{op.name} of {value!r}: an array or a number was wanted, got "
            f"{type(value).__name__}."
        ) from error
    ordered = op in (ReduceOp.MIN, ReduceOp.MAX)
    if jnp.issubdtype(array.dtype, jnp.number):
        if not (ordered and jnp.issubdtype(array.dtype, jnp.complexfloating)):
            return array
        advice = "Complex numbers have no order; reduce `jnp.abs(value)` instead."
    elif array.dtype == jnp.bool_:
        if ordered:
            return array
        advice = "Convert it first: `value.astype('int32')` counts the true ones."
    else:
        advice = "Only numbers can be reduced."
    raise TypeError(f"{op.name} of a {array.dtype} array is not defined. {advice}")


def floating(array: jax.Array) -> jax.Array:
    """`array`, or its floating-point form, as a mean has it."""
    # Before the sum, so that integers do not wrap on the way to their mean.
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(float)


def empty(op: ReduceOp, array: jax.Array) -> jax.Array:
    """What an array without elements is reduced to, with nothing to tell others."""
    return jnp.zeros_like(floating(array) if op is ReduceOp.MEAN else array)


def unfolded(array: jax.Array) -> jax.Array:
    """`array`, with nothing known of it while it is compiled if it is complex.

    XLA computes the sum over replicas of a constant while it compiles, and ends the
    process if that is complex (jaxlib 0.10.2 to 0.12). A sum of no rows is a constant,
    as is the gradient of a sum; so results need this, too.
    """
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return lax.optimization_barrier(array) if is_complex else array


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


def extreme(
    op: ReduceOp, array: jax.Array, axes: Axes, groups: Any = None
) -> jax.Array:
    """The smallest or largest of the replicas' elements, or of each group's."""
    return _extreme(array, axes, op is ReduceOp.MIN, groups)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extreme(array: jax.Array, axes: Axes, smallest: bool, groups: Any) -> jax.Array:
    if not axes:
        return array
    reduce = lax.pmin if smallest else lax.pmax
    return reduce(array, axes, axis_index_groups=groups)


@_extreme.defjvp
def _extreme_jvp(
    axes: Axes, smallest: bool, groups: Any, primals: Any, tangents: Any
) -> Any:
    (array,), (tangent,) = primals, tangents
    extreme = _extreme(array, axes, smallest, groups)
    holds_it = (array == extreme).astype(tangent.dtype)

    def total(of: jax.Array) -> jax.Array:
        return lax.psum(of, axes, axis_index_groups=groups) if axes else of

    return extreme, total(holds_it * tangent) / total(holds_it)
