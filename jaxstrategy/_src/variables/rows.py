"""Reads and changes of some rows of a table, in a trace one equation each."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from jaxstrategy._src.sharded import lookup
from jaxstrategy._src.values.arrays import Function, Index, Value
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
    """The shards that have rows of `index`, in the order in which it names them."""
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
    """Raise what NumPy raises of an index that an array of this shape has not."""
    # Without memory: all elements are one.
    np.broadcast_to(np.False_, shape)[index]


READ = "jaxstrategy_server_rows"
"""The equation `ids, *shards -> rows`."""

CHANGED = {name: f"jaxstrategy_server_scatter_{name}" for name in SCATTERS}
"""By the operation the equation `ids, values, *shards -> new shards`."""


def read_rows(ids: jax.Array, shards: Sequence[jax.Array]) -> jax.Array:
    """The rows with these numbers; it can be differentiated with respect to shards.

    Shapes: ids `[...]`, shards `[length, ...]` -> `[*ids.shape, ...]`.

    Args:
      ids: numbers of rows. What is no row, a negative one too, gives what `jnp.take`
        fills in (NaN), and no gradient; where a server reads, it is an error.
      shards: one or more.
    """
    numbers = row_numbers(ids, _starts(shards)[-1])
    rows = _read(numbers, *shards)
    return rows.reshape(*ids.shape, *shards[0].shape[1:])


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
    numbers = row_numbers(ids, _starts(shards)[-1])
    return _changing(operation)(numbers, values, *shards)


def row_numbers(ids: jax.Array, rows: int) -> jax.Array:
    """`ids` as the equations take them: `[n]`, in 32 bits if these are enough.

    Args:
      ids: any whole numbers.
      rows: how many there are; what is none of them stays none.
    """
    wanted = jnp.iinfo("int32" if rows < 2**31 else "int64")
    given = jnp.iinfo(ids.dtype)
    # Before they are cut to fewer bits: what is beyond must not become a row. What
    # fits stays as it is, for messages.
    if given.min < wanted.min:
        ids = jnp.maximum(ids, wanted.min)
    if given.max > wanted.max:
        ids = jnp.minimum(ids, wanted.max)
    return ids.astype(wanted.dtype).reshape(-1)


def _starts(shards: Sequence[jax.Array]) -> list[int]:
    """The first row of each shard, and last the number of all rows."""
    return list(itertools.accumulate((len(shard) for shard in shards), initial=0))


@jax.custom_jvp
def _read(ids: jax.Array, *shards: jax.Array) -> jax.Array:
    return _read_by_name(ids, *shards)


@functools.partial(_read.defjvp, symbolic_zeros=True)
def _with_tangent(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array | SymbolicZero, ...]
) -> tuple[jax.Array, jax.Array]:
    ids, *shards = primals
    rows = _read(ids, *shards)
    tangent = jnp.zeros_like(rows)
    for (own, _), each in zip(_own_rows(ids, shards), tangents[1:], strict=True):
        if not isinstance(each, SymbolicZero) and len(each):
            # Operations of JAX: transposed they add up rows of the shard's shape.
            tangent += each.at[own].get(mode="fill", fill_value=0)
    return rows, tangent


@custom_vmap
def _read_by_name(ids: jax.Array, *shards: jax.Array) -> jax.Array:
    return _named(READ, _taken)(ids, *shards)


@_read_by_name.def_vmap
def _read_of_many(
    size: int, is_batched: list[bool], ids: jax.Array, *shards: jax.Array
) -> tuple[jax.Array, bool]:
    """The ids of all examples at once, if they have one table."""
    if not any(is_batched[1:]):
        rows = _read(ids.reshape(-1), *shards)
        return rows.reshape(*ids.shape, *shards[0].shape[1:]), True
    axes = [0 if each else None for each in is_batched]
    return jax.vmap(_taken, axes)(ids, *shards), True


def _taken(ids: jax.Array, *shards: jax.Array) -> jax.Array:
    """The definition of a read: no table of all shards is made."""
    first, *others = _own_rows(ids, shards)
    rows = _filled(shards[0], first[0])
    for (own, is_own), shard in zip(others, shards[1:], strict=True):
        mask = is_own.reshape(-1, *(1,) * (rows.ndim - 1))
        rows = jnp.where(mask, _filled(shard, own), rows)
    return rows


def _filled(shard: jax.Array, own: jax.Array) -> jax.Array:
    """The shard's rows with these numbers, and what `jnp.take` fills in beyond."""
    if not len(shard):  # of which JAX gathers nothing
        shard, own = jnp.zeros((1, *shard.shape[1:]), shard.dtype), own + 1
    return shard.at[own].get(mode="fill")


@functools.cache
def _changing(operation: str) -> Callable[..., tuple[jax.Array, ...]]:
    of_row = SCATTERS[operation].operation

    def define(
        ids: jax.Array, values: jax.Array, *shards: jax.Array
    ) -> tuple[jax.Array, ...]:
        return tuple(
            changed(shard, own, values, of_row)
            for (own, _), shard in zip(_own_rows(ids, shards), shards, strict=True)
        )

    call = custom_vmap(_named(CHANGED[operation], define))

    @call.def_vmap
    def _of_many(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple:
        axes = [0 if each else None for each in is_batched]
        new = jax.vmap(define, axes)(*operands)
        return new, tuple(True for _ in new)

    return call


@functools.cache
def _named(name: str, define: Function) -> Function:
    def marked(*operands: jax.Array) -> object:
        return define(*operands)

    marked.__name__ = marked.__qualname__ = name
    return jax.jit(marked)


def _own_rows(
    ids: jax.Array, shards: Sequence[jax.Array]
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """For each shard the numbers of its own rows, and which ids are its rows.

    Those of other shards become its length, which `at` leaves out; a negative one would
    count from the end.
    """
    for start, shard in zip(_starts(shards), shards, strict=False):
        own = ids - start
        is_own = (own >= 0) & (own < len(shard))
        yield jnp.where(is_own, own, len(shard)), is_own
