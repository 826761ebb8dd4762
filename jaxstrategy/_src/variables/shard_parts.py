"""Parts of a table in shards, as `table[index]` names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.types import Index
from jaxstrategy._src.variables import row_lookups
from jaxstrategy._src.variables.abstract_variable import AbstractVariable
from jaxstrategy._src.variables.row_pieces import RowPiece, check_index, row_pieces


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
    """The value of a part, of the shape that NumPy gives it.

    Args:
      shards: variables, or arrays.
      index: of the whole.
      whole: gives the value of all.

    Raises:
      IndexError: the index is out of bounds.
      ValueError: a slice has step 0.
      TypeError: an array of JAX is part of the index.
    """
    starts = row_lookups.starts_of(shards)
    shape = (starts[-1], *shards[0].shape[1:])
    _check_known(index)
    check_index(index, shape)
    found = row_index(index, len(shape))
    if found is None:
        return whole()[_with_arrays(index)]
    pieces = row_pieces(found.rows, starts)
    values = [_rows_of(shards[piece.shard], piece) for piece in pieces]
    if not isinstance(found.rows, slice):
        return values[0][0][found.rest]
    if not values:
        values = [jnp.zeros((0, *shape[1:]), shards[0].dtype)]
    rows = values[0] if len(values) == 1 else jnp.concatenate(values)
    return rows[(slice(None), *found.rest)] if found.rest else rows


def row_index(index: Index, rank: int) -> RowIndex | None:
    """`index` as one of rows, None if it is none of these.

    Args:
      index: of an array that has so many dimensions.
      rank: this number.
    """
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


def _rows_of(shard: Any, piece: RowPiece) -> jax.Array:
    if not isinstance(shard, AbstractVariable):
        return shard[_as_rows(piece)]
    if row_lookups.are_elsewhere([shard]):
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
