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
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jaxstrategy._src.reductions.operations import Axes
from jaxstrategy._src.replicas.state_sharding import Shaped


def summed_by_id(ids: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The different ids `[n]` in ascending order, then -1; the sums `[n, ...]` of rows.

    The rows of an id are added in their order, as a scatter adds them.
    """
    order = jnp.argsort(ids, stable=True)
    ascending = ids[order]
    is_new = jnp.concatenate([jnp.ones(1, bool), ascending[1:] != ascending[:-1]])
    places = jnp.cumsum(is_new) - 1
    different = jnp.full_like(ids, -1).at[places].set(ascending)
    return different, jnp.zeros_like(rows).at[places].add(rows[order])


@dataclasses.dataclass(frozen=True)
class _Route:
    """The way of each of n ids: `[n]` to `[owner, n]` and back."""

    owners: jax.Array  # of each id, the replica that has its row
    places: jax.Array  # of each id, its place among those for that replica
    rows: jax.Array  # in the owner's block; its length for what is no row
    parts: int  # the number of owners
    axes: Axes

    def sent(self, values: jax.Array, filling: int) -> jax.Array:
        """The others' `values` `[n, ...]` for this owner: `[sender, n, ...]`."""
        buffer = jnp.full((self.parts, *values.shape), filling, values.dtype)
        buffer = buffer.at[self.owners, self.places].set(values)
        return lax.all_to_all(buffer, self.axes, 0, 0)

    def returned(self, values: jax.Array) -> jax.Array:
        """What owners have for this replica, `[n, ...]`, of `[sender, n, ...]`."""
        found = lax.all_to_all(values, self.axes, 0, 0)
        return found[self.owners, self.places]


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
    """The rows `[n, ...]` of the table with these ids `[n]`, from their owners."""
    if not ids.size or not block.size:  # XLA refuses to send nothing
        return jnp.take(block, ids, axis=0, mode="fill")
    route = _route(ids, block.shape[0], axes)
    wanted = route.sent(route.rows, filling=0)
    return route.returned(jnp.take(block, wanted, axis=0, mode="fill"))


def added(
    ids: jax.Array, rows: jax.Array, block: int, axes: Axes, dtype: DTypeLike
) -> jax.Array:
    """This replica's block of the sum of all replicas' rows, each added at its id.

    What each replica has added up is of the type of its rows, the sum of type `dtype`.
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


def named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which stands in a trace as one `jit` equation of this name."""

    def marked(*operands: jax.Array) -> Any:
        return fn(*operands)

    marked.__name__ = marked.__qualname__ = name
    return jax.jit(marked)


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
    """

    # How its equation is found; the same in every process, and of no other definition.
    name: str
    whole: Callable[..., Result]
    # Dimensions of the operands. An equation with others is not this function:
    # `jax.vmap` keeps the name, and adds a dimension.
    ranks: tuple[int, ...]
    of_parts: Callable[..., Result]
    # The operands that `of_parts` takes parts of, along dimension 0. The others it
    # takes whole: each replica's own, which may differ unless `are_rest_equal`.
    divided: tuple[int, ...]
    returns_divided: tuple[int, ...] = ()  # the results that are parts

    @property
    def are_rest_equal(self) -> bool:
        """Whether operands that are not divided must be equal on all replicas."""
        # Those of a function that returns parts are: parts of one array.
        return bool(self.returns_divided)

    def __call__(self, *operands: jax.Array) -> Result:
        """The result on whole arrays; in a trace one equation."""
        return self._jitted(*operands)

    @functools.cached_property
    def _jitted(self) -> Callable[..., Result]:
        return named(self.name, self.whole)


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


def row_numbers(ids: jax.Array, rows: int) -> jax.Array:
    """`ids` in 32 bits if these are enough; what is no row stays none."""
    wanted = jnp.iinfo("int32" if rows < 2**31 else "int64")
    given = jnp.iinfo(ids.dtype)
    # Before they are cut to fewer bits: what is beyond must not become a row. What
    # fits stays as it is, for messages.
    if given.min < wanted.min:
        ids = jnp.maximum(ids, wanted.min)
    if given.max > wanted.max:
        ids = jnp.minimum(ids, wanted.max)
    return ids.astype(wanted.dtype)


def row_starts(tables: Sequence[Any]) -> list[int]:
    """The first row of each of several tables, and last the number of all rows."""
    return list(itertools.accumulate((each.shape[0] for each in tables), initial=0))


def own_rows(
    ids: jax.Array, starts: Sequence[int]
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """For each of several tables the numbers of its own rows, and which ids these are.

    Those of others become its length, which `at` leaves out; a negative one would not.
    """
    for start, stop in itertools.pairwise(starts):
        is_own = (ids >= start) & (ids < stop)
        yield jnp.where(is_own, ids - start, stop - start), is_own


def rows_of_tables(
    ids: jax.Array,
    tables: Sequence[jax.Array],
    take: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """The rows of several tables, one after the other; no table of all is made."""
    rows = jnp.zeros(())
    for number, (own, is_own) in enumerate(own_rows(ids, row_starts(tables))):
        table = tables[number]
        if not len(table):  # JAX gathers nothing from it
            table, own = jnp.zeros((1, *table.shape[1:]), table.dtype), own + 1
        found = take(table, own)
        rows = jnp.where(over_rows(is_own, found), found, rows) if number else found
    return rows


def row_reader(
    equation: Callable[..., jax.Array], definition: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """`ids, *tables -> rows` that stands in traces as `equation` of these.

    Also differentiated by tables, and mapped over ids; over tables as `definition`.
    """

    @custom_vmap
    def mapped(ids: jax.Array, *tables: jax.Array) -> jax.Array:
        return equation(ids, *tables)

    @mapped.def_vmap
    def _mapped(
        size: int, is_batched: list[bool], ids: jax.Array, *tables: jax.Array
    ) -> tuple[jax.Array, bool]:
        if any(is_batched[1:]):
            axes = [0 if each else None for each in is_batched]
            return jax.vmap(definition, axes)(ids, *tables), True
        # The ids of all examples at once.
        rows = mapped(ids.reshape(-1), *tables)
        return rows.reshape(*ids.shape, *rows.shape[1:]), True

    @jax.custom_jvp
    def differentiable(ids: jax.Array, *tables: jax.Array) -> jax.Array:
        return mapped(ids, *tables)

    @functools.partial(differentiable.defjvp, symbolic_zeros=True)
    def _jvp(
        primals: tuple[jax.Array, ...], tangents: tuple[jax.Array | SymbolicZero, ...]
    ) -> tuple[jax.Array, jax.Array]:
        ids, *tables = primals
        # It calls itself, so that it can be differentiated again. The tangent is an
        # operation of JAX: one transposed under `jax.vmap` adds the rows of all
        # examples to one table, where a rule of ours would make a table of each.
        rows = differentiable(ids, *tables)
        tangent = jnp.zeros_like(rows)
        every = zip(own_rows(ids, row_starts(tables)), tangents[1:], strict=True)
        for (own, _), table in every:
            if not isinstance(table, SymbolicZero) and len(table):
                tangent += _gathered(table, own)
        return rows, tangent

    def read(ids: jax.Array, *tables: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(tables[0].dtype, jnp.inexact)
        return (differentiable if is_float else mapped)(ids, *tables)

    return read


def _gathered(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows with these ids, and zeros for what is no row."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, table.ndim)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    return lax.gather(
        table, ids[:, None], numbers, (1, *table.shape[1:]), mode="fill", fill_value=0
    )


def table_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows of a table with these ids; the gradient leaves out what is no row."""
    return _table_reader(table.ndim)(ids, table)


@functools.cache
def _table_reader(rank: int) -> Callable[..., jax.Array]:
    """`ids, table -> rows`, of tables with so many dimensions."""

    def whole(ids: jax.Array, table: jax.Array) -> jax.Array:
        rows = jnp.take(table, jnp.maximum(ids, 0), axis=0, mode="fill")
        return _without_missing(ids, rows)

    def of_parts(ids: jax.Array, block: jax.Array, *, axes: Axes) -> jax.Array:
        return _without_missing(ids, taken(block, ids, axes))

    name, ranks = f"jaxstrategy_table_rows_{rank}", (1, rank)
    function = ShardFunction(name, whole, ranks, of_parts, divided=(1,))
    return row_reader(cast(Any, registered(function)), whole)


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
    -> `[length / replicas, *features]`, of a table of this shape.
    """
    length, *features = shape
    parts = lax.axis_size(axes)
    assert length % parts == 0, "a table is divided into equal blocks"
    ids, each = indices.reshape(-1), rows.reshape(-1, *features)
    return added(ids, each, length // parts, axes, dtype)


def _without_missing(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """`rows`, with zeros for ids of -1."""
    return jnp.where(over_rows(ids < 0, rows), jnp.zeros_like(rows), rows)


def over_rows(each: jax.Array, rows: jax.Array) -> jax.Array:
    """What is said of each row, `[n]`, for all of its numbers: `[n, 1, ...]`."""
    return each.reshape(-1, *(1,) * (rows.ndim - 1))
