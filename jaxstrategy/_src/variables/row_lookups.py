"""Lookups of rows in tables that may be sharded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.reductions.rows import table_rows
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.arrays import Index
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.abstract_variable import AbstractVariable
from jaxstrategy._src.variables.rows import (
    RowPiece,
    check_index,
    known_numbers,
    read_rows,
    row_numbers,
    row_pieces,
)


def looked_up(shards: Sequence[Any], ids: jax.Array) -> jax.Array:
    """The rows with these numbers, of all shards one after the other.

    Shapes: ids `[...]`, shards `[length, ...]` -> `[*ids.shape, ...]`.

    Args:
      shards: one or more, all variables or all arrays.
      ids: numbers of rows; what is no row gives what `jnp.take` fills in, but is an
        error of a server.
    """
    flat = ids.reshape(-1)
    if all(isinstance(shard, AbstractVariable) for shard in shards):
        rows = _of_variables(shards, flat)
    else:
        rows = _of_values(shards, flat)
    return rows.reshape(*ids.shape, *shards[0].shape[1:])


def _of_variables(shards: Sequence[AbstractVariable], ids: jax.Array) -> jax.Array:
    starts = starts_of(shards)
    known = known_numbers(ids)
    if known is not None and are_elsewhere(shards):
        rows = _of_servers(shards, starts, known)
    else:
        with access.recording(None):  # a lookup is no use of the whole
            values = [shard.value() for shard in shards]
        is_remote = all(shard._kind.has_remote_rows for shard in shards)
        rows = read_rows(ids, values) if is_remote else _of_values(values, ids)
    tape = access.current()
    return rows if tape is None else tape.looked_up(shards, starts, ids, rows)


def starts_of(shards: Sequence[Any]) -> list[int]:
    """The first row of each shard, and last the number of all rows."""
    return list(itertools.accumulate((each.shape[0] for each in shards), initial=0))


def are_elsewhere(shards: Sequence[AbstractVariable]) -> bool:
    """Whether rows can be had without the others, and are not part of a trace."""
    if access.tracing() is not None or any(map(access.is_given, shards)):
        return False
    return all(shard._kind.has_remote_rows for shard in shards)


def _of_servers(
    shards: Sequence[AbstractVariable], starts: Sequence[int], ids: np.ndarray
) -> jax.Array:
    rows = np.zeros((len(ids), *shards[0].shape[1:]), shards[0].dtype)
    owners = np.searchsorted(starts, ids, side="right") - 1
    for number, shard in enumerate(shards):
        is_own = owners == number
        if is_own.any():
            rows[is_own] = shard._rows(ids[is_own] - starts[number])
    return jnp.asarray(rows)


def _of_values(values: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
    """Rows of arrays, which go between replicas that have some rows each."""
    starts = starts_of(values)
    numbers = row_numbers(ids, starts[-1])
    is_none = (numbers < 0) | (numbers >= starts[-1])
    rows = jnp.zeros(())
    for number, value in enumerate(values):
        start, stop = starts[number : number + 2]
        is_own = (numbers >= start) & (numbers < stop)
        # To `table_rows` -1 is no row, and the length beyond all rows.
        own = jnp.where(is_own, numbers - start, -1)
        if not number:
            rows = _rows_of(value, jnp.where(is_none, stop, own))
            continue
        mask = is_own.reshape(-1, *(1,) * (rows.ndim - 1))
        rows = jnp.where(mask, _rows_of(value, own), rows)
    return rows


def _rows_of(value: jax.Array, own: jax.Array) -> jax.Array:
    if not len(value):  # of which JAX gathers nothing
        value = jnp.zeros((1, *value.shape[1:]), value.dtype)
        own = jnp.where(own < 0, own, 1)
    return table_rows(value, own)


class RowIndex(NamedTuple):
    """An index of some rows, and of the same part of each.

    Attributes:
      rows: of dimension 0.
      rest: of the others.
    """

    rows: int | slice
    rest: tuple[Index, ...]


def part(
    shards: Sequence[Any], index: Index, whole: Callable[[], jax.Array]
) -> jax.Array:
    """The value of a part, of the shape that NumPy gives it."""
    starts = starts_of(shards)
    shape = (starts[-1], *shards[0].shape[1:])
    _check_known(index)
    check_index(index, shape)
    found = row_index(index, len(shape))
    if found is None:
        return whole()[_with_arrays(index)]
    pieces = row_pieces(found.rows, starts)
    values = [_rows_of_part(shards[piece.shard], piece) for piece in pieces]
    if not isinstance(found.rows, slice):
        return values[0][0][found.rest]
    if not values:
        values = [jnp.zeros((0, *shape[1:]), shards[0].dtype)]
    rows = values[0] if len(values) == 1 else jnp.concatenate(values)
    return rows[(slice(None), *found.rest)] if found.rest else rows


def row_index(index: Index, rank: int) -> RowIndex | None:
    """`index` as one of rows, None if it is none of these."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(map(_is_basic, items)):
        return None
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if dots:
        (at,) = dots
        others = sum(item is not None for item in items) - 1
        filled = (slice(None),) * (rank - others)
        items = (*items[:at], *filled, *items[at + 1 :])
    if not items:
        return RowIndex(slice(None), ())
    first, *rest = items
    return None if first is None else RowIndex(first, tuple(rest))


def _is_basic(item: Index) -> bool:
    if item is None or item is Ellipsis or isinstance(item, slice):
        return True
    return isinstance(item, (int, np.integer)) and not isinstance(item, bool)


def _rows_of_part(shard: Any, piece: RowPiece) -> jax.Array:
    if not isinstance(shard, AbstractVariable):
        return shard[_as_rows(piece)]
    if are_elsewhere([shard]):
        return shard._rows(np.asarray(piece.rows, np.int32))
    return shard.value()[_as_rows(piece)]


def _as_rows(piece: RowPiece) -> slice:
    own = piece.own
    return own if isinstance(own, slice) else slice(own, own + 1)


def _check_known(index: Index) -> None:
    for item in _items(index):
        if isinstance(item, jax.Array) or hasattr(type(item), "__jax_array__"):
            raise TypeError(
                f"A ShardedVariable was indexed with {shown(index)}, which has an "
                "array of JAX; numbers of Python or NumPy were wanted, because they "
                "decide which shards are read. For rows that JAX computes use "
                "`sparse_read(ids)` or `js.experimental.embedding_lookup(v, ids)`."
            )


def _with_arrays(index: Index) -> Index:
    """`index` as JAX takes it, without lists."""
    if isinstance(index, tuple):
        return tuple(map(_with_arrays, index))
    return np.asarray(index) if isinstance(index, list) else index


def _items(index: Index) -> Iterator[object]:
    for item in index if isinstance(index, (tuple, list)) else (index,):
        if isinstance(item, slice):
            yield from (item.start, item.stop, item.step)
        elif isinstance(item, list):
            yield from _items(item)
        else:
            yield item
