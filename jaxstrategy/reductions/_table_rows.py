"""Rows of a table by their ids, of whole tables and of parts.

Ids are whole numbers `[n]` from -1 to the number of rows: -1 is no row and gives zeros,
the number of rows is beyond the table and gives what `jnp.take` fills in, NaN.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from jaxstrategy.reductions import _exchange
from jaxstrategy.reductions._shard_functions import ShardFunction, registered
from jaxstrategy.reductions._sums import Axes


def table_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows of `table`, `[rows, ...]`, with these ids: `[n, ...]`.

    Its gradient leaves ids out that are no rows.
    """
    if not jnp.issubdtype(table.dtype, jnp.inexact):
        return _taken(table, ids)
    return _differentiable_rows(table, ids)


@jax.custom_jvp
def _differentiable_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table_rows` of a table that has derivatives."""
    return _taken(table, ids)


@_differentiable_rows.defjvp
def _with_tangent(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    table, ids = primals
    # It calls itself, so that it can be differentiated again. The tangent is an
    # operation of JAX: one transposed under `jax.vmap` adds the rows of all examples to
    # one table, where a rule of ours for gradients would make a table of each.
    return _differentiable_rows(table, ids), _gathered(tangents[0], ids)


def _gathered(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows with these ids, and zeros for what is no row."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, table.ndim)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    # A negative index of a gather is no row, as one beyond is.
    return lax.gather(
        table, ids[:, None], numbers, (1, *table.shape[1:]), mode="fill", fill_value=0
    )


@custom_vmap
def _taken(table: jax.Array, ids: jax.Array) -> jax.Array:
    rows = _taking(table.ndim)(table, ids)
    assert isinstance(rows, jax.Array), "it has one result"
    return rows


@_taken.def_vmap
def _taken_of_many(
    size: int, is_batched: list[bool], table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, bool]:
    """The ids of all examples at once, if they have one table."""
    has_tables, has_ids = is_batched
    if not has_tables:
        rows = _taken(table, ids.reshape(-1))
        return rows.reshape(*ids.shape, *table.shape[1:]), True
    axes = 0, 0 if has_ids else None
    rows = jax.vmap(_taking(table.ndim - 1), axes)(table, ids)
    assert isinstance(rows, jax.Array), "it has one result"
    return rows, True


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


def part_of_sum(
    shape: tuple[int, ...],
    indices: jax.Array,
    rows: jax.Array,
    *,
    axes: Axes,
    dtype: DTypeLike,
) -> jax.Array:
    """This replica's block of the sum over replicas of a table that has few rows.

    Shapes: indices `[..., 1]`, rows `[..., *features]`
    -> `[length / replicas, *features]`.

    Args:
      shape: that of the table, `(length, *features)`.
      indices: of the rows; those that are no row of the table are left out.
      rows: what each replica adds.
      axes: the mesh axes over which the table is divided.
      dtype: to which each replica converts its table before it is summed.
    """
    length, *features = shape
    parts = lax.axis_size(axes)
    assert length % parts == 0, "a table is divided into equal blocks"
    ids, each = indices.reshape(-1), rows.reshape(-1, *features)
    return _exchange.added(ids, each, length // parts, axes, dtype)


def _filled(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, jnp.maximum(ids, 0), axis=0, mode="fill")


def _without_missing(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """`rows`, of which those with id -1 are zeros."""
    is_missing = jnp.expand_dims(ids < 0, range(1, rows.ndim))
    return jnp.where(is_missing, jnp.zeros_like(rows), rows)
