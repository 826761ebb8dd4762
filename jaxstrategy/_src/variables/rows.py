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
from jax.custom_batching import custom_vmap
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.contexts import context
from jaxstrategy._src.reductions import rows as _rows
from jaxstrategy._src.sharded.lookup import known_numbers
from jaxstrategy._src.text import shown
from jaxstrategy._src.values.arrays import Index
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.changes import SCATTERS, changed

# The equations that stand for what a server does.

READ = "jaxstrategy_server_rows"
"""The equation `ids, *shards -> rows`."""

CHANGED = {name: f"jaxstrategy_server_scatter_{name}" for name in SCATTERS}
"""By the operation the equation `ids, values, *shards -> new shards`."""


def _filled(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table.at[ids].get(mode="fill")


def _read(ids: jax.Array, *shards: jax.Array) -> jax.Array:
    return _rows.rows_of_tables(ids, shards, _filled)


# What is no row, a negative number too, gives what `jnp.take` fills in (NaN), and no
# gradient; where a server reads, it is an error.
_reader = _rows.row_reader(_rows.named(READ, _read), _read)


def changed_rows(
    operation: str, ids: jax.Array, values: jax.Array, shards: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """The shards with some rows changed; a row may be there more than once.

    What is no row changes nothing; where a server makes the change, it is an error.
    """
    numbers = _rows.row_numbers(ids, _rows.row_starts(shards)[-1])
    return _changing(operation)(numbers, values, *shards)


@functools.cache
def _changing(operation: str) -> Callable[..., tuple[jax.Array, ...]]:
    of_row = SCATTERS[operation].operation

    def define(
        ids: jax.Array, values: jax.Array, *shards: jax.Array
    ) -> tuple[jax.Array, ...]:
        every = zip(_rows.own_rows(ids, _rows.row_starts(shards)), shards, strict=True)
        return tuple(changed(shard, own, values, of_row) for (own, _), shard in every)

    call = custom_vmap(_rows.named(CHANGED[operation], define))

    @call.def_vmap
    def _of_many(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple:
        axes = [0 if each else None for each in is_batched]
        new = jax.vmap(define, axes)(*operands)
        return new, tuple(True for _ in new)

    return call


# Lookups, recorded by the function that is differentiated.


class Lookup(NamedTuple):
    """One lookup."""

    shards: tuple[int, ...]  # the `id` of each shard of the table
    starts: tuple[int, ...]  # the first row of each, and last the number of all rows
    rows: jax.ShapeDtypeStruct  # of what it gives, `[n, ...]`


@final
class RowTape:
    """The lookups of one call of a function in variables, known by `id`.

    Something is `added` to the rows of each lookup; None while lookups are counted.
    """

    def __init__(
        self, watched: Iterable[int], added: Sequence[jax.Array] | None = None
    ) -> None:
        self._watched = set(watched)
        self._added = added
        self._trace = get_opaque_trace_state()
        self.lookups: list[Lookup] = []
        self.ids: list[jax.Array] = []
        self.whole: set[int] = set()  # used by something else than lookups

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
        self.lookups.append(Lookup(keys, tuple(_rows.row_starts(shards)), like))
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
    """The rows `[*ids.shape, ...]` of all shards, variables or arrays, in a row.

    What is no row gives what `jnp.take` fills in, but is an error of a server.
    """
    flat, known, tape = ids.reshape(-1), None, None
    are_variables = all(isinstance(shard, Handle) for shard in shards)
    if are_variables:
        known = known_numbers(flat) if _are_elsewhere(shards) else None
        tape = cast("RowTape | None", context.current().lookups)
    if known is not None:
        found = np.zeros((len(known), *shards[0].shape[1:]), shards[0].dtype)
        for number, (places, own) in places_of(known, _rows.row_starts(shards)):
            found[places] = shards[number]._remote_rows(own)
        rows = jnp.asarray(found)
    elif are_variables:
        with recording(None):  # a lookup is no use of the whole
            values = [shard.value() for shard in shards]
        is_remote = all(shard._kind.has_remote_rows for shard in shards)
        rows = _of_arrays(values, flat, is_remote)
    else:
        rows = _of_arrays(shards, flat)
    rows = rows if tape is None else tape.looked_up(shards, flat, rows)
    return rows.reshape(*ids.shape, *shards[0].shape[1:])


def _of_arrays(
    values: Sequence[jax.Array], ids: jax.Array, are_remote: bool = False
) -> jax.Array:
    """Rows of arrays, from replicas that have some each, or by an equation."""
    ids = _rows.row_numbers(ids, _rows.row_starts(values)[-1])
    if are_remote:
        return _reader(ids, *values)
    return _rows.rows_of_tables(ids, values, _rows.table_rows)


def _are_elsewhere(shards: Sequence[Any]) -> bool:
    """Whether rows can be had without the others, and are not part of a trace."""
    if access.tracing() is not None or any(map(access.is_given, shards)):
        return False
    return all(shard._kind.has_remote_rows for shard in shards)


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


def as_slice(rows: range) -> slice:
    """`rows` as an index."""
    # To a slice a negative end is one from behind.
    return slice(rows.start, rows.stop if rows.stop >= 0 else None, rows.step)


def row_index(index: Index, rank: int) -> tuple[int | slice, tuple[Index, ...]] | None:
    """`index` as one of some rows and of the same part of each; None of others."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(map(_is_basic, items)):
        return None
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if dots:
        (at,) = dots
        others = sum(item is not None for item in items) - 1
        filled = (slice(None),) * (rank - others)
        items = (*items[:at], *filled, *items[at + 1 :])
    first, *rest = items or (slice(None),)
    return None if first is None else (first, tuple(rest))


def _is_basic(item: Index) -> bool:
    if item is None or item is Ellipsis or isinstance(item, slice):
        return True
    return isinstance(item, (int, np.integer)) and not isinstance(item, bool)


def row_pieces(
    index: int | slice, starts: Sequence[int]
) -> list[tuple[int, range, slice]]:
    """The numbers of shards that have rows of `index`, in the order that it has.

    With each its rows, and which of the named ones they are.
    """
    total = starts[-1]
    if isinstance(index, slice):
        named = range(total)[index]
    else:
        row = index + total if index < 0 else index
        named = range(row, row + 1)
    rising, pieces = named if named.step > 0 else named[::-1], []
    for shard, (start, stop) in enumerate(itertools.pairwise(starts)):
        first, last = (bisect.bisect_left(rising, each) for each in (start, stop))
        if named.step < 0:
            first, last = len(named) - last, len(named) - first
        place = slice(first, last)
        own = named[place]
        if own:
            rows = range(own.start - start, own.stop - start, own.step)
            pieces.append((shard, rows, place))
    return pieces if named.step > 0 else pieces[::-1]


def part(
    shards: Sequence[Any], index: Index, whole: Callable[[], jax.Array]
) -> jax.Array:
    """The value of a part, of the shape that NumPy gives it."""
    starts = _rows.row_starts(shards)
    shape = (starts[-1], *shards[0].shape[1:])
    _check_known(index)
    # Raises what NumPy raises. Without memory: all elements are one.
    np.broadcast_to(np.False_, shape)[index]
    found = row_index(index, len(shape))
    if found is None:
        return whole()[_with_arrays(index)]
    named, rest = found
    values = []
    for number, own, _ in row_pieces(named, starts):
        shard = shards[number]
        if not isinstance(shard, Handle):
            values.append(shard[as_slice(own)])
        elif _are_elsewhere([shard]):
            values.append(shards[number]._remote_rows(np.asarray(own, np.int32)))
        else:
            values.append(shard.value()[as_slice(own)])
    if not isinstance(named, slice):
        return values[0][0][rest]
    if not values:
        values = [jnp.zeros((0, *shape[1:]), shards[0].dtype)]
    rows = values[0] if len(values) == 1 else jnp.concatenate(values)
    return rows[(slice(None), *rest)] if rest else rows


def _check_known(index: Index) -> None:
    items: list[object] = []
    for item in jax.tree.leaves(index):
        is_slice = isinstance(item, slice)
        items += (item.start, item.stop, item.step) if is_slice else (item,)
    for item in items:
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
