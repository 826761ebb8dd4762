"""Rows of a table of which each replica has a block, sent to and from their owners.

Replica i owns the i-th of equal blocks of rows. Every replica has room for all its ids
at every other, so that no row is ever dropped, whichever ids there are; XLA on CPU has
no `ragged_all_to_all` (JAX 0.10 and 0.12).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxstrategy.reductions._rows_by_id import summed_by_id
from jaxstrategy.reductions._sums import Axes


@dataclasses.dataclass(frozen=True)
class _Route:
    """The way of each of n ids: `[n]` to `[owner, n]` and back.

    Attributes:
      owners: of each id, the replica that has its row.
      places: of each id, its place among those for that replica.
      rows: of each id, the number of its row in its owner's block; the length of the
        block for an id that is no row of the table.
      parts: the number of owners.
      axes: those of the replicas.
    """

    owners: jax.Array
    places: jax.Array
    rows: jax.Array
    parts: int
    axes: Axes

    def sent(self, values: jax.Array, filling: int) -> jax.Array:
        """The others' `values` `[n, ...]` for this owner: `[sender, n, ...]`."""
        shape = (self.parts, *values.shape)
        buffer = jnp.full(shape, filling, values.dtype)
        return self._exchanged(buffer.at[self.owners, self.places].set(values))

    def returned(self, values: jax.Array) -> jax.Array:
        """What owners have for this replica, `[n, ...]`, of `[sender, n, ...]`."""
        return self._exchanged(values)[self.owners, self.places]

    def _exchanged(self, buffer: jax.Array) -> jax.Array:
        return lax.all_to_all(buffer, self.axes, 0, 0)


def _route(ids: jax.Array, block: int, axes: Axes) -> _Route:
    parts = lax.axis_size(axes)
    owners = jnp.clip(ids // block, 0, parts - 1)
    order = jnp.argsort(owners, stable=True)
    ordered = owners[order]
    first = jnp.searchsorted(ordered, jnp.arange(parts, dtype=ids.dtype))
    numbers = jnp.arange(ids.size) - first[ordered]
    places = jnp.zeros(ids.shape, numbers.dtype).at[order].set(numbers)
    is_row = (ids >= 0) & (ids < block * parts)
    rows = jnp.where(is_row, ids - owners * block, block)
    return _Route(owners, places, rows, parts, axes)


def taken(block: jax.Array, ids: jax.Array, axes: Axes) -> jax.Array:
    """The rows of the table with these ids, from their owners.

    Shapes: this replica's block `[rows / replicas, ...]`, its ids `[n]` -> `[n, ...]`.
    An id that is no row of the table gives what `jnp.take` fills in.
    """
    if not ids.size or not block.size:  # XLA refuses to send nothing
        return jnp.take(block, ids, axis=0, mode="fill")
    route = _route(ids, block.shape[0], axes)
    wanted = route.sent(route.rows, filling=0)
    return route.returned(jnp.take(block, wanted, axis=0, mode="fill"))


def added(
    ids: jax.Array, rows: jax.Array, block: int, axes: Axes, dtype: DTypeLike
) -> jax.Array:
    """This replica's block of the sum of all replicas' rows, each added at its id.

    Shapes: ids `[n]`, rows `[n, ...]` -> `[block, ...]`. Rows with an id that is no row
    of the table are left out. What each replica has added up is of the type of its
    rows; the sum of that over the replicas is of type `dtype`.
    """
    zeros = jnp.zeros((block, *rows.shape[1:]), dtype)
    if not rows.size:
        return zeros
    # Each replica's own sums first, as the sum of whole gradients has them.
    ids, rows = summed_by_id(ids, rows)
    route = _route(ids, block, axes)
    places = route.sent(route.rows, filling=block)
    sent = route.sent(rows, filling=0).astype(dtype)
    return zeros.at[places].add(sent, mode="drop")


def numbers_in_block(ids: jax.Array, block: int, axes: Axes) -> jax.Array:
    """The numbers of the rows `[n]` in this replica's block; -1 of others' rows."""
    numbers = ids - lax.axis_index(axes) * block
    return jnp.where((numbers >= 0) & (numbers < block), numbers, -1)
