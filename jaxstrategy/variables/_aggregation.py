"""Several copies of a variable, or values for it, to one: pure functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxstrategy._options import ReduceOp, VariableAggregation
from jaxstrategy._slices import IndexedSlices
from jaxstrategy.reductions._all_reduce import Axes, all_reduce
from jaxstrategy.reductions._gather import all_gather
from jaxstrategy.reductions._sparse import reduce_slices

_REDUCED = {
    VariableAggregation.SUM: ReduceOp.SUM,
    VariableAggregation.MEAN: ReduceOp.MEAN,
}


def is_key(dtype: Any) -> bool:
    """Whether it is that of random keys, which are no numbers."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def check(aggregation: VariableAggregation, dtype: Any, name: str) -> None:
    """Raise unless values of `dtype` can be aggregated so.

    Raises:
      ValueError: MEAN of integers, SUM or MEAN of bools or random keys.
    """
    if aggregation not in _REDUCED or jnp.issubdtype(dtype, jnp.inexact):
        return
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if is_integer and aggregation is VariableAggregation.SUM:
        return
    advice = "'sum' or " if is_integer else ""
    raise ValueError(
        f"Variable {name!r} holds {dtype.name}, which has no aggregation "
        f"{aggregation.name}. Use {advice}'only_first_replica', or another dtype: "
        "`dtype='float32'`."
    )


def across(aggregation: VariableAggregation, value: Any, axes: Axes) -> jax.Array:
    """One value for all from this replica's own, inside a step.

    Args:
      aggregation: anything but NONE.
      value: this replica's.
      axes: the mesh axes of the replicas.
    """
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return all_gather(jnp.asarray(value)[None], 0, axes)[0]
    return all_reduce(_REDUCED[aggregation], value, axes)


def rows_across(
    aggregation: VariableAggregation, rows: IndexedSlices, axes: Axes, replicas: int
) -> IndexedSlices:
    """The same of some rows; `aggregation` is not NONE."""
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return jax.tree.map(lambda part: across(aggregation, part, axes), rows)
    return reduce_slices(_REDUCED[aggregation], rows, axes, replicas)


def of_copies(aggregation: VariableAggregation, copies: jax.Array) -> jax.Array:
    """One value from all replicas' `[replica, ...]`; `aggregation` is not NONE."""
    match aggregation:
        case VariableAggregation.SUM:
            return jnp.sum(copies, 0, dtype=copies.dtype)
        case VariableAggregation.MEAN:
            return jnp.mean(copies, 0)
        case _:
            return copies[0]


def shares(
    aggregation: VariableAggregation, value: jax.Array, replicas: int
) -> tuple[jax.Array, jax.Array]:
    """What the first copy and each other one must be, so that they aggregate to it."""
    if aggregation is not VariableAggregation.SUM:
        return value, value
    if jnp.issubdtype(value.dtype, jnp.integer):
        each = value // replicas
        return value - each * (replicas - 1), each
    each = (value / replicas).astype(value.dtype)
    return each, each
