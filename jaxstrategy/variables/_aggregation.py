"""Several copies of a variable, or values for it, to one: pure functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxstrategy._options import ReduceOp, VariableAggregation
from jaxstrategy.reductions._all_reduce import Axes, all_reduce
from jaxstrategy.reductions._gather import all_gather

_REDUCED = {
    VariableAggregation.SUM: ReduceOp.SUM,
    VariableAggregation.MEAN: ReduceOp.MEAN,
}


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
