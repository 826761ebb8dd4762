"""A step of an optimizer on some rows of a table, on whole tables and on parts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxstrategy._src.reductions import rows as _rows
from jaxstrategy._src.reductions.operations import Axes
from jaxstrategy._src.reductions.rows import ShardFunction, registered, summed_by_id
from jaxstrategy._src.sharded.row_optimizers import RowOptimizer, Slots


def updated(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    ids: jax.Array,
    gradient: jax.Array,
    learning_rate: jax.Array,
) -> tuple[jax.Array, Slots]:
    """The table and its slots after a step; rows that are not in `ids` as they were.

    Shapes: table and slots `[length, ...]`, ids `[n]` from -1 to the length, gradient
    `[n, ...]`, of which the rows of one id are added up.
    """
    names = tuple(sorted(slots))
    numbers = [jnp.asarray(number, table.dtype) for number in optimizer.numbers]
    function = _updating(type(optimizer), names, table.ndim, len(numbers))
    arrays = [table, *(slots[name] for name in names)]
    results = function(*arrays, ids, gradient, learning_rate, *numbers)
    assert isinstance(results, tuple), "the table, and its slots"
    return results[0], dict(zip(names, results[1:], strict=True))


@functools.cache
def _updating(
    kind: type[RowOptimizer], names: tuple[str, ...], rank: int, numbers: int
) -> ShardFunction:
    """`table, *slots, ids, gradient, learning_rate, *numbers -> table, *slots`."""
    stored = 1 + len(names)

    def whole(*operands: jax.Array) -> tuple[jax.Array, ...]:
        arrays, (ids, gradient, *scalars) = operands[:stored], operands[stored:]
        length = arrays[0].shape[0]
        if not ids.size:
            return arrays
        different, sums = summed_by_id(ids, gradient)
        places = jnp.where(different < 0, length, different)  # dropped, as all beyond
        rows, *slots = (_taken(array, places) for array in arrays)
        given = dict(zip(names, slots, strict=True))
        rows, changed = kind.changed(rows, given, sums, *scalars)
        new = [rows, *(changed[name] for name in names)]
        return tuple(
            array.at[places].set(rows.astype(array.dtype), mode="drop")
            for array, rows in zip(arrays, new, strict=True)
        )

    def of_parts(*operands: jax.Array, axes: Axes) -> tuple[jax.Array, ...]:
        blocks, (ids, *rest) = operands[:stored], operands[stored:]
        own = _rows.numbers_in_block(ids, blocks[0].shape[0], axes)
        return whole(*blocks, own, *rest)

    return registered(
        ShardFunction(
            f"jaxstrategy_updated_rows_{kind.__name__}_{rank}",
            whole,
            ranks=(*(rank,) * stored, 1, rank, *(0,) * (1 + numbers)),
            of_parts=of_parts,
            divided=tuple(range(stored)),
            returns_divided=tuple(range(stored)),
        )
    )


def _taken(array: jax.Array, places: jax.Array) -> jax.Array:
    return array.at[places].get(mode="fill", fill_value=0)
