"""Rows of tables by their ids, of whole tables and of parts.

Ids are whole numbers `[n]` from -1 to the number of rows: -1 is no row and gives zeros,
the number of rows is beyond the table and gives what `jnp.take` fills in, NaN. Of a
divided table replica i owns the i-th of equal blocks of rows. Every replica has room
for all its ids at every other, so that no row is ever dropped; XLA on CPU has no
`ragged_all_to_all` (JAX 0.10 and 0.12).

A `ShardFunction` works on whole arrays everywhere; in a trace it is one `jit` equation
of its name. Who knows that an operand lies divided finds it by the equation
(`called_by`) and calls `of_parts`, so that nobody has to have the whole array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from jaxstrategy._src.reductions.operations import Axes
from jaxstrategy._src.replicas.state_sharding import Shaped


def summed_by_id(ids: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each id once, with the sum of its rows.

    The rows of an id are added in their order, as a scatter adds them.

    Shapes: ids `[n]`, rows `[n, ...]` -> ids `[n]`, sums `[n, ...]`, of which the first
    are the different ids in ascending order; after those come ids -1 with zeros.
    """
    order = jnp.argsort(ids, stable=True)
    ascending = ids[order]
    is_new = jnp.concatenate([jnp.ones(1, bool), ascending[1:] != ascending[:-1]])
    places = jnp.cumsum(is_new) - 1
    different = jnp.full_like(ids, -1).at[places].set(ascending)
    return different, jnp.zeros_like(rows).at[places].add(rows[order])


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


# An underscore between words: the name is a symbol in the program that XLA gets.
_PREFIX = "jaxstrategy_"


Result: TypeAlias = jax.Array | tuple[jax.Array, ...]


@final
@dataclasses.dataclass(frozen=True)
class ShardFunction:
    """A function of whole arrays that can also be computed from parts of them.

    A part is a block of dimension 0: replica i has the i-th of equal blocks. `whole`
    uses no collective; `of_parts` is called by all replicas, inside a
    `shard_map(check_vma=False)`, with the operands and `axes=`: the mesh axes over
    which arrays are divided, along which it uses collectives.

    The function must not be differentiated: JAX's own derivative of the equation would
    keep its name. A `jax.custom_jvp` around it has the derivative; a `custom_vmap` in
    between may say what becomes of several calls.

    Attributes:
      name: how its equation is found. Of another definition it must be another name;
        in every process it is the same.
      whole: the definition on whole arrays; of one array, or a tuple of them.
      ranks: the number of dimensions of each operand. An equation with others is not
        this function: `jax.vmap` keeps the name, and adds a dimension.
      of_parts: the same from parts.
      divided: the operands of which `of_parts` takes parts: all of these must lie
        divided along dimension 0. The others it takes whole: each replica's own, which
        may differ between replicas unless `are_rest_equal`.
      returns_divided: the results of which `of_parts` gives this replica's part.
      are_rest_equal: whether the other operands must be equal on all replicas. They
        are of every function that returns parts: parts of one array.
    """

    name: str
    whole: Callable[..., Result]
    ranks: tuple[int, ...]
    of_parts: Callable[..., Result]
    divided: tuple[int, ...]
    returns_divided: tuple[int, ...] = ()

    @property
    def are_rest_equal(self) -> bool:
        """Whether operands that are not divided must be equal on all replicas."""
        return bool(self.returns_divided)

    def __call__(self, *operands: jax.Array) -> Result:
        """The result on whole arrays; in a trace one equation."""
        return self._jitted(*operands)

    @functools.cached_property
    def _jitted(self) -> Callable[..., Result]:
        def marked(*operands: jax.Array) -> Result:
            return self.whole(*operands)

        marked.__name__ = marked.__qualname__ = self.name
        return jax.jit(marked)


_REGISTERED: dict[str, ShardFunction] = {}


def registered(function: ShardFunction) -> ShardFunction:
    """`function`, which `called_by` finds from now on."""
    assert function.name.startswith(_PREFIX), "no function of a user has this name"
    assert function.name not in _REGISTERED, f"two functions are {function.name}"
    _REGISTERED[function.name] = function
    return function


def called_by(
    name: str,
    operands: Sequence[Shaped],
    results: Sequence[Shaped],
) -> ShardFunction | None:
    """The function that a `jit` equation calls, None if it calls something else."""
    found = _REGISTERED.get(name)
    if found is None or tuple(len(each.shape) for each in operands) != found.ranks:
        return None
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
    wanted = jax.tree.leaves(jax.eval_shape(found.whole, *types))
    given = [(each.shape, each.dtype) for each in results]
    return found if given == [(each.shape, each.dtype) for each in wanted] else None


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
        return _without_missing(ids, taken(block, ids, axes))

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
    return added(ids, each, length // parts, axes, dtype)


def _filled(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, jnp.maximum(ids, 0), axis=0, mode="fill")


def _without_missing(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """`rows`, of which those with id -1 are zeros."""
    is_missing = jnp.expand_dims(ids < 0, range(1, rows.ndim))
    return jnp.where(is_missing, jnp.zeros_like(rows), rows)
