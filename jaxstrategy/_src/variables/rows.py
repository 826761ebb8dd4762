"""Rows of variables: lookups, parts, and changes, each in the shard that has it.

Where a server has the rows, a read or a change of them is one equation of a trace, by
whose name it is found.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.contexts import context
from jaxstrategy._src.reductions.rows import (
    own_rows,
    row_numbers,
    row_reader,
    row_starts,
    rows_of_tables,
    table_rows,
)
from jaxstrategy._src.sharded import lookup
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.arrays import Function, Index, Value
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.abstract_variable import AbstractVariable
from jaxstrategy._src.variables.changes import SCATTERS, changed


def checked_ids(
    ids: Value, rows: int, name: str, are_padded: bool = False
) -> jax.Array:
    """`ids` as an array of whole numbers."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(ids)):
        return lookup.integers(ids)
    with jax.ensure_compile_time_eval():  # in a trace, too
        found = lookup.integers(ids)
    known = known_numbers(found)
    if known is not None and known.size:
        is_wrong = (known >= rows) | ((known < 0) & (not are_padded))
        if is_wrong.any():
            raise IndexError(
                f"Row {known[is_wrong][0]} of variable {name!r} was asked for, which "
                f"has the rows [0, {rows}). No number counts from the end."
            )
    return found


def known_numbers(array: jax.Array) -> np.ndarray | None:
    """The numbers of `array` on the host, None if it is traced or elsewhere."""
    if isinstance(array, Tracer) or not array.is_fully_addressable:
        return None
    return np.asarray(array)


# The equations that stand for what a server does.

READ = "jaxstrategy_server_rows"
"""The equation `ids, *shards -> rows`."""

CHANGED = {name: f"jaxstrategy_server_scatter_{name}" for name in SCATTERS}
"""By the operation the equation `ids, values, *shards -> new shards`."""


def named(name: str, fn: Function) -> Function:
    """`fn`, which stands in a trace as one `jit` equation of this name."""

    def marked(*operands: jax.Array) -> Any:
        return fn(*operands)

    marked.__name__ = marked.__qualname__ = name
    return jax.jit(marked)


def _filled(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table.at[ids].get(mode="fill")


def _read(ids: jax.Array, *shards: jax.Array) -> jax.Array:
    return rows_of_tables(ids, shards, _filled)


# What is no row, a negative number too, gives what `jnp.take` fills in (NaN), and no
# gradient; where a server reads, it is an error.
_reader = row_reader(named(READ, _read), _read)


def changed_rows(
    operation: str, ids: jax.Array, values: jax.Array, shards: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """The shards with some rows changed; a row may be there more than once.

    Args:
      operation: one of `CHANGED`.
      ids: numbers of rows, `[n]`. What is no row changes nothing; where a server makes
        the change, it is an error.
      values: a row for each, `[n, ...]`, of the shards' dtype.
      shards: one or more, `[length, ...]`.
    """
    numbers = row_numbers(ids, row_starts(shards)[-1])
    return _changing(operation)(numbers, values, *shards)


@functools.cache
def _changing(operation: str) -> Callable[..., tuple[jax.Array, ...]]:
    of_row = SCATTERS[operation].operation

    def define(
        ids: jax.Array, values: jax.Array, *shards: jax.Array
    ) -> tuple[jax.Array, ...]:
        every = zip(own_rows(ids, row_starts(shards)), shards, strict=True)
        return tuple(changed(shard, own, values, of_row) for (own, _), shard in every)

    call = custom_vmap(named(CHANGED[operation], define))

    @call.def_vmap
    def _of_many(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple:
        axes = [0 if each else None for each in is_batched]
        new = jax.vmap(define, axes)(*operands)
        return new, tuple(True for _ in new)

    return call


# Lookups, of which a function that is differentiated takes note.


class Lookup(NamedTuple):
    """One lookup.

    Attributes:
      shards: the `id` of each shard of the table.
      starts: the first row of each shard, and last the number of all rows.
      rows: the type of what it gives, `[n, ...]`.
    """

    shards: tuple[int, ...]
    starts: tuple[int, ...]
    rows: jax.ShapeDtypeStruct


@final
class RowTape:
    """The lookups of one call of a function, made while it runs.

    Args:
      watched: the `id` of each variable of whose lookups it takes note.
      added: what is added to the rows of each lookup; None while lookups are counted.

    Attributes:
      lookups: those that were made, in order.
      ids: the rows of each.
      whole: the `id` of each variable that was used by something else than lookups.
    """

    def __init__(
        self, watched: Iterable[int], added: Sequence[jax.Array] | None = None
    ) -> None:
        self._watched = set(watched)
        self._added = added
        self._trace = get_opaque_trace_state()
        self.lookups: list[Lookup] = []
        self.ids: list[jax.Array] = []
        self.whole: set[int] = set()

    def looked_up(
        self, shards: Sequence[Handle], ids: jax.Array, rows: jax.Array
    ) -> jax.Array:
        """The rows `[n, ...]` with these ids, with what is added to them."""
        keys = tuple(map(id, shards))
        if not self._watched.intersection(keys):
            return rows
        # In a loop, or a function that is jitted, ids are that function's own.
        if get_opaque_trace_state() != self._trace:
            self.whole.update(keys)
            return rows
        like = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        self.lookups.append(Lookup(keys, tuple(row_starts(shards)), like))
        self.ids.append(ids)
        if self._added is None:
            return rows
        return rows + self._added[len(self.ids) - 1]

    def sparse(self) -> set[int]:
        """The variables that are only looked up, the shards of a table all or none."""
        whole = set(self.whole)
        for _ in self.lookups:  # each round adds a table, or is the last
            for shards, *_ in self.lookups:
                if whole.intersection(shards):
                    whole.update(shards)
        return self._watched - whole


def recording(tape: RowTape | None) -> contextlib.AbstractContextManager[object]:
    """A `with` block whose lookups `tape` takes note of; with None nothing does."""
    return context.entered(lookups=tape)


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
        rows = _of_arrays(shards, flat)
    return rows.reshape(*ids.shape, *shards[0].shape[1:])


def _of_variables(shards: Sequence[AbstractVariable], ids: jax.Array) -> jax.Array:
    known = known_numbers(ids)
    if known is not None and _are_elsewhere(shards):
        rows = _of_servers(shards, known)
    else:
        with recording(None):  # a lookup is no use of the whole
            values = [shard.value() for shard in shards]
        is_remote = all(shard._kind.has_remote_rows for shard in shards)
        rows = _of_arrays(values, ids, is_remote)
    tape = cast("RowTape | None", context.current().lookups)
    return rows if tape is None else tape.looked_up(shards, ids, rows)


def _of_arrays(
    values: Sequence[jax.Array], ids: jax.Array, are_remote: bool = False
) -> jax.Array:
    """Rows of arrays, from replicas that have some each, or by an equation."""
    ids = row_numbers(ids, row_starts(values)[-1])
    if are_remote:
        return _reader(ids, *values)
    return rows_of_tables(ids, values, table_rows)


def _are_elsewhere(shards: Sequence[AbstractVariable]) -> bool:
    """Whether rows can be had without the others, and are not part of a trace."""
    if access.tracing() is not None or any(map(access.is_given, shards)):
        return False
    return all(shard._kind.has_remote_rows for shard in shards)


def _of_servers(shards: Sequence[AbstractVariable], ids: np.ndarray) -> jax.Array:
    rows = np.zeros((len(ids), *shards[0].shape[1:]), shards[0].dtype)
    for number, (places, own) in places_of(ids, row_starts(shards)):
        rows[places] = shards[number]._remote_rows(own)
    return jnp.asarray(rows)


def places_of(
    ids: np.ndarray, starts: Sequence[int]
) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
    """Of known ids, for each shard that has some, where these are and its own rows."""
    owners = np.searchsorted(starts, ids, side="right") - 1
    for number in range(len(starts) - 1):
        (places,) = np.nonzero(owners == number)
        if len(places):
            yield number, (places, ids[places] - starts[number])


# Parts of tables, which numbers and slices name.


class RowIndex(NamedTuple):
    """An index of some rows, and of the same part of each.

    Attributes:
      rows: of dimension 0.
      rest: of the others.
    """

    rows: int | slice
    rest: tuple[Index, ...]


class RowPiece(NamedTuple):
    """The rows of one shard among those that an index names.

    Attributes:
      shard: its number.
      rows: a range of the shard's rows.
      place: which of the named rows they are.
    """

    shard: int
    rows: range
    place: slice

    @property
    def own(self) -> slice:
        """The rows as an index of the shard."""
        # To a slice a negative end is one from behind.
        rows, stop = self.rows, self.rows.stop
        return slice(rows.start, stop if stop >= 0 else None, rows.step)


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


def row_pieces(index: int | slice, starts: Sequence[int]) -> list[RowPiece]:
    """The shards that have rows of `index`, in the order in which it names them."""
    total = starts[-1]
    if isinstance(index, slice):
        named = range(total)[index]
    else:
        row = index + total if index < 0 else index
        named = range(row, row + 1)
    pieces = []
    for shard, (start, stop) in enumerate(itertools.pairwise(starts)):
        place = _within(named, start, stop)
        own = named[place]
        if own:
            rows = range(own.start - start, own.stop - start, own.step)
            pieces.append(RowPiece(shard, rows, place))
    return pieces if named.step > 0 else pieces[::-1]


def _within(named: range, start: int, stop: int) -> slice:
    """The places in `named` of rows from `start` to `stop`."""
    rising = named if named.step > 0 else named[::-1]
    first, last = (bisect.bisect_left(rising, each) for each in (start, stop))
    if named.step < 0:
        first, last = len(named) - last, len(named) - first
    return slice(first, last)


def part(
    shards: Sequence[Any], index: Index, whole: Callable[[], jax.Array]
) -> jax.Array:
    """The value of a part, of the shape that NumPy gives it."""
    starts = row_starts(shards)
    shape = (starts[-1], *shards[0].shape[1:])
    _check_known(index)
    # Raises what NumPy raises. Without memory: all elements are one.
    np.broadcast_to(np.False_, shape)[index]
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


def _rows_of_part(shard: Any, piece: RowPiece) -> jax.Array:
    if not isinstance(shard, AbstractVariable):
        return shard[piece.own]
    if _are_elsewhere([shard]):
        return shard._remote_rows(np.asarray(piece.rows, np.int32))
    return shard.value()[piece.own]


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
