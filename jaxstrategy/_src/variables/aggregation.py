"""Combines copies of a variable as `VariableAggregation` says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.options import ReduceOp, VariableAggregation
from jaxstrategy._src.reductions.operations import OPERATIONS
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.inner_axes import inner_spec, of_versions, with_inner
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.slices import IndexedSlices

_Summand = TypeVar("_Summand", jax.Array, IndexedSlices)

# How those are reduced that are; of the others one counts.
REDUCED = {
    VariableAggregation[op.name]: op
    for op in ReduceOp
    if op.name in VariableAggregation.__members__
}


def check(aggregation: VariableAggregation, dtype: np.dtype, name: str) -> None:
    """Raise unless values of `dtype` can be aggregated so."""
    if aggregation not in REDUCED or jnp.issubdtype(dtype, jnp.inexact):
        return
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if is_integer and not OPERATIONS[REDUCED[aggregation]].divides:
        return
    advice = "'sum' or " if is_integer else ""
    raise ValueError(
        f"Variable {name!r} holds {dtype.name}, which has no aggregation "
        f"{aggregation.name}. Use {advice}'only_first_replica', or another dtype: "
        "`dtype='float32'`."
    )


def across(
    aggregation: VariableAggregation, value: _Summand, strategy: AbstractStrategy
) -> _Summand:
    """One value for all from this replica's own, inside a step."""
    if aggregation in REDUCED:
        return strategy._reduction.reduce_leaves(REDUCED[aggregation], [value])[0]
    return jax.tree.map(strategy._reduction.first, value)


def of_copies(
    aggregation: VariableAggregation,
    copies: jax.Array,
    strategy: AbstractStrategy,
) -> jax.Array:
    """One value from all replicas' `[replica, ...]`, outside a step."""
    if aggregation in REDUCED:
        return strategy.reduce(REDUCED[aggregation], PerReplica(copies))
    replicas = strategy._replicas
    inner = of_versions(inner_spec(copies, replicas))
    first = _first(with_inner(inner, replicas))(copies)
    # There mirrored variables are, and reduced values.
    return mesh.place(first, with_inner(inner, strategy._parameter_replicas))


# JAX knows jitted functions by identity: a new one at each read would compile anew.
@functools.cache
def _first(where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    def first_copy(copies: jax.Array) -> jax.Array:
        return copies[0]

    return jax.jit(first_copy, out_shardings=where)


def shares(
    aggregation: VariableAggregation, value: jax.Array, replicas: int
) -> tuple[jax.Array, jax.Array]:
    """The first copy, and each other one, that together aggregate to `value`."""
    if aggregation is not VariableAggregation.SUM:
        return value, value
    if jnp.issubdtype(value.dtype, jnp.integer):
        each = value // replicas
        # What does not divide goes to the first, so that the copies sum to `value`.
        return value - each * (replicas - 1), each
    each = (value / replicas).astype(value.dtype)
    return each, each
