"""Rows of a table by their ids, and the gradient of that, on whole tables and on parts.

Ids are whole numbers `[n]` from -1 to the number of rows: -1 is no row and gives zeros,
the number of rows is beyond the table and gives what `jnp.take` fills in, NaN.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxstrategy.reductions import _exchange
from jaxstrategy.reductions._shard_functions import ShardFunction, registered
from jaxstrategy.reductions._sums import Axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def table_rows(length: int, table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows of `table`, `[length, ...]`, with these ids: `[n, ...]`.

    Its gradient leaves ids out that are no rows. It is no forward-mode derivative:
    `jax.jvp` refuses it.
    """
    return _one(_taking(table.ndim)(table, ids))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed_rows(length: int, rows: jax.Array, ids: jax.Array) -> jax.Array:
    """A table `[length, ...]` of zeros, with each row `[n, ...]` added at its id."""
    return _one(_summing(length, rows.ndim)(ids, rows))


# Each function calls itself going forward, so that it can be differentiated again.


def _taken_with_ids(
    length: int, table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return table_rows(length, table, ids), ids


def _taken_back(
    length: int, ids: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None]:
    return summed_rows(length, gradient, ids), None


def _summed_with_ids(
    length: int, rows: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return summed_rows(length, rows, ids), ids


def _summed_back(
    length: int, ids: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None]:
    # Rows beyond the table were left out: their gradient is zero, not NaN.
    return table_rows(length, gradient, jnp.where(ids < length, ids, -1)), None


table_rows.defvjp(_taken_with_ids, _taken_back)
summed_rows.defvjp(_summed_with_ids, _summed_back)


@functools.cache
def _taking(rank: int) -> ShardFunction:
    """`table, ids -> rows`, of tables with so many dimensions."""

    def of_parts(block: jax.Array, ids: jax.Array, *, axes: Axes) -> jax.Array:
        return _without_missing(ids, _exchange.taken(block, ids, axes))

    return registered(
        ShardFunction(
            f"jaxstrategy_table_rows_{rank}",
            lambda table, ids: _without_missing(ids, _filled(table, ids)),
            ranks=(rank, 1),
            of_parts=of_parts,
            divided=(0,),
        )
    )


@functools.cache
def _summing(length: int, rank: int) -> ShardFunction:
    """`ids, rows -> table`, of tables of this length with so many dimensions."""

    def whole(ids: jax.Array, rows: jax.Array) -> jax.Array:
        zeros = jnp.zeros((length, *rows.shape[1:]), rows.dtype)
        return zeros.at[jnp.where(ids < 0, length, ids)].add(rows, mode="drop")

    def part_of_sum(
        ids: jax.Array, rows: jax.Array, *, axes: Axes, dtype: DTypeLike
    ) -> jax.Array:
        parts = jax.lax.axis_size(axes)
        assert length % parts == 0, "a table is divided into equal blocks"
        return _exchange.added(ids, rows, length // parts, axes, dtype)

    return registered(
        ShardFunction(
            f"jaxstrategy_summed_rows_{rank}_{length}",
            whole,
            ranks=(1, rank),
            part_of_sum=part_of_sum,
        )
    )


def _filled(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, jnp.maximum(ids, 0), axis=0, mode="fill")


def _without_missing(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """`rows`, of which those with id -1 are zeros."""
    is_missing = jnp.expand_dims(ids < 0, range(1, rows.ndim))
    return jnp.where(is_missing, jnp.zeros_like(rows), rows)


def _one(result: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
    assert isinstance(result, jax.Array), "these functions have one result"
    return result
