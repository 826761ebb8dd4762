"""Changes of a table in shards: each shard takes its own rows of what is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.contexts import replica_context
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.slices import IndexedSlices, is_slices
from jaxstrategy._src.values.types import Value
from jaxstrategy._src.variables import access, row_functions, row_lookups
from jaxstrategy._src.variables.abstract_variable import AbstractVariable
from jaxstrategy._src.variables.access import Side
from jaxstrategy._src.variables.cell import Holder
from jaxstrategy._src.variables.changes import WORDS, Change
from jaxstrategy._src.variables.initial_value import is_host_array
from jaxstrategy._src.variables.kinds.kind import VariableKind, whole
from jaxstrategy._src.variables.kinds.mirrored_kind import MirroredKind
from jaxstrategy._src.variables.row_numbers import checked_ids, known_numbers
from jaxstrategy._src.variables.row_pieces import row_pieces
from jaxstrategy._src.variables.shard_parts import row_index

Shards = Sequence[AbstractVariable]


def write(shards: Shards, kind: VariableKind, value: Value, change: Change) -> None:
    """Assign, or add, a value for all shards, or for a part of them.

    Nothing is written if the value does not fit.

    Args:
      shards: in the order of their rows.
      kind: of the whole, for messages.
      value: what was given.
      change: what is done with it.

    Raises:
      ValueError: another shape.
      TypeError: a dtype that would lose something; a part that cannot be assigned.
    """
    is_rows = is_slices(value) and isinstance(kind, MirroredKind)
    if is_rows and change.is_whole and change.operation != "set":
        change_rows(shards, kind, value, change)
        return
    shape = _shape(shards)
    value = whole(value, shape)
    if isinstance(value, PerReplica) and access.tracing() is not None:
        value = replica_context.to_replica(value)
    cut = _parts(shards, kind, value, change, shape)
    with access.one_at_a_time:
        for shard, part, own in list(cut):
            shard._written(part, own, shard._kind.write)


def _parts(
    shards: Shards,
    kind: VariableKind,
    value: Value,
    change: Change,
    shape: tuple[int, ...],
) -> Iterator[tuple[AbstractVariable, Value, Change]]:
    """For each shard that changes what it takes, and how."""
    if not change.is_whole:
        yield from _parts_of_index(shards, kind, value, change, shape)
        return
    starts = row_lookups.starts_of(shards)
    rows_of = _cut(kind, value, shape, shards[0].dtype)
    for shard, start, stop in zip(shards, starts, starts[1:], strict=False):
        yield shard, rows_of(start, stop), change


def _cut(
    kind: VariableKind, value: Value, shape: tuple[int, ...], dtype: np.dtype
) -> Callable[[int, int], Value]:
    """A function that gives the rows of `value` between two numbers."""
    if isinstance(value, PerReplica):
        versions = per_replica.contents(value)
        wanted = (len(versions), *shape)
        kind._checked(versions, wanted, dtype)
        return lambda start, stop: PerReplica(versions[:, start:stop])
    if is_host_array(value):
        # Checked by its type: no device need have all of it.
        jax.eval_shape(lambda given: kind._checked(given, shape, dtype), value)
        return lambda start, stop: value[start:stop]
    given = kind._checked(value, shape, dtype)
    return lambda start, stop: given[start:stop]


def _parts_of_index(
    shards: Shards,
    kind: VariableKind,
    value: Value,
    change: Change,
    shape: tuple[int, ...],
) -> Iterator[tuple[AbstractVariable, Value, Change]]:
    """As `_parts`, of a part of all: its rows, or entries that arrays name."""
    index = change.index
    if isinstance(index, tuple) and index and isinstance(index[0], jax.Array):
        given = kind._checked_part(value, shape, shards[0].dtype, change)
        first, *rest = index
        for shard, own in zip(shards, _own(shards, first), strict=True):
            yield shard, given, change.of_part((own, *rest))
        return
    found = row_index(index, len(shape))
    if found is None:
        raise TypeError(
            f"`{change.method}` of variable {kind.name!r}, which is in shards, was "
            f"called on its part [{shown(index)}]; numbers and slices were wanted. "
            "For rows that an array names use `scatter_update`, `scatter_add` and "
            "their kin."
        )
    given = kind._checked_part(value, shape, shards[0].dtype, change)
    for piece in row_pieces(found.rows, row_lookups.starts_of(shards)):
        is_many = isinstance(found.rows, slice)
        part = given[piece.place] if is_many else given
        yield shards[piece.shard], part, change.of_part((piece.own, *found.rest))


def change_rows(
    shards: Shards, kind: VariableKind, rows: IndexedSlices, change: Change
) -> None:
    """Change some rows, each in the shard that has it.

    Nothing is changed if a row does not fit.

    Args:
      shards: in the order of their rows.
      kind: of the whole, for messages.
      rows: of the whole.
      change: what is done with them.

    Raises:
      NotImplementedError: the variables, or their aggregation, have no such change.
      IndexError: a row that there is not.
      ValueError: the rows do not fit; or copies would differ.
      TypeError: not `IndexedSlices`, or a dtype that would lose something.
    """
    rows = kind.rows_for(rows, change)
    shape, side = _shape(shards), access.side()
    if rows.dense_shape not in (None, shape):
        raise ValueError(
            f"Variable {kind.name!r} has shape {shape} and was given rows of an array "
            f"of shape {rows.dense_shape}."
        )
    ids = checked_ids(rows.indices, shape[0], kind.name)
    values = kind._checked(rows.values, (len(ids), *shape[1:]), shards[0].dtype)
    rows = kind.combined(IndexedSlices(values, ids), side)
    with access.one_at_a_time:
        if access.tracing() is not None and kind.has_remote_rows:
            _change_together(shards, rows, change)
            return
        for shard, own in list(_of_each(shards, rows)):
            shard._written(own, change, _combined_already(shard))


def _of_each(
    shards: Shards, rows: IndexedSlices
) -> Iterator[tuple[AbstractVariable, IndexedSlices]]:
    """The rows of each shard; those without any are left out where they are known."""
    known = None if access.tracing() is not None else known_numbers(rows.indices)
    starts = row_lookups.starts_of(shards)
    if known is None:
        for shard, own in zip(shards, _own(shards, rows.indices), strict=True):
            yield shard, IndexedSlices(rows.values, own)
        return
    owners = np.searchsorted(starts, known, side="right") - 1
    for number, shard in enumerate(shards):
        (places,) = np.nonzero(owners == number)
        if len(places) == len(known) and len(known):
            yield shard, IndexedSlices(rows.values, known - starts[number])
        elif len(places):
            own = known[places] - starts[number]
            yield shard, IndexedSlices(rows.values[places], own)


def _own(shards: Shards, ids: jax.Array) -> Iterator[jax.Array]:
    """For each shard the numbers of its own rows, and its length for the others.

    That is left out by `at`, where a negative number would count from the end.
    """
    starts = row_lookups.starts_of(shards)
    numbers = row_functions.row_numbers(ids, starts[-1])
    for start, stop in zip(starts, starts[1:], strict=False):
        is_own = (numbers >= start) & (numbers < stop)
        yield jnp.where(is_own, numbers - start, stop - start)


def _combined_already(shard: AbstractVariable) -> Callable[..., jax.Array | PerReplica]:
    """The kind's `scatter` of rows that are those of all replicas."""

    def write(
        ref: Holder, side: Side, rows: IndexedSlices, change: Change
    ) -> jax.Array | PerReplica:
        return shard._kind.scatter(ref, Side.CROSS, rows, change)

    return write


def _change_together(shards: Shards, rows: IndexedSlices, change: Change) -> None:
    """Change all shards by one equation, in a function that goes to workers."""
    holders = [shard._reference() for shard in shards]
    new = row_functions.changed_rows(
        WORDS[change.operation],
        rows.indices,
        rows.values,
        [holder[...] for holder in holders],
    )
    own = _own(shards, rows.indices)
    for shard, each, numbers in zip(shards, new, own, strict=True):
        made = _made_already(shard, IndexedSlices(rows.values, numbers))
        shard._written(each, change, made)


def _made_already(
    shard: AbstractVariable, rows: IndexedSlices
) -> Callable[..., jax.Array]:
    """A `write` of what a change of rows has made of the shard."""

    def write(ref: Holder, side: Side, value: jax.Array, change: Change) -> jax.Array:
        return shard._kind.rows_changed(ref, rows, change, value)

    return write


def _shape(shards: Shards) -> tuple[int, ...]:
    return (row_lookups.starts_of(shards)[-1], *shards[0].shape[1:])
