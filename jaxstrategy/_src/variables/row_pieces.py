"""The rows that an index names, shard by shard: `RowPiece`."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxstrategy._src.values.types import Index


class RowPiece(NamedTuple):
    """The rows of one shard among those that an index names.

    Attributes:
      shard: its number.
      own: the rows, as an index of that shard.
      rows: the same as a range of the shard's rows.
      place: which of the named rows they are.
    """

    shard: int
    own: int | slice
    rows: range
    place: slice


def row_pieces(index: int | slice, starts: Sequence[int]) -> list[RowPiece]:
    """The shards that have rows of `index`, in the order in which it names them.

    Args:
      index: of dimension 0, which it fits.
      starts: the first row of each shard, and last the number of all rows.
    """
    total = starts[-1]
    if isinstance(index, slice):
        named = range(total)[index]
    else:
        row = index + total if index < 0 else index
        named = range(row, row + 1)
    pieces = []
    for shard, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        place = _within(named, start, stop)
        own = named[place]
        if not own:
            continue
        rows = range(own.start - start, own.stop - start, own.step)
        at = _as_slice(rows) if isinstance(index, slice) else rows[0]
        pieces.append(RowPiece(shard, at, rows, place))
    return pieces if named.step > 0 else pieces[::-1]


def _within(named: range, start: int, stop: int) -> slice:
    """The places in `named` of rows from `start` to `stop`."""
    if named.step > 0:
        return slice(bisect.bisect_left(named, start), bisect.bisect_left(named, stop))
    rising = named[::-1]
    count = len(named)
    first = count - bisect.bisect_left(rising, stop)
    return slice(first, count - bisect.bisect_left(rising, start))


def _as_slice(rows: range) -> slice:
    # To a slice a negative end is one from behind.
    return slice(rows.start, rows.stop if rows.stop >= 0 else None, rows.step)


def check_index(index: Index, shape: tuple[int, ...]) -> None:
    """Raise what NumPy raises of an index that an array of this shape has not.

    Raises:
      IndexError: it is out of bounds, or has more dimensions.
      ValueError: a slice has step 0.
      TypeError: it is no index.
    """
    # Without memory: all elements are one.
    np.broadcast_to(np.False_, shape)[index]
