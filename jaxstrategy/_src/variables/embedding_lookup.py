"""Rows of tables that variables hold: `embedding_lookup`."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxstrategy._src.sharded import lookup
from jaxstrategy._src.sharded.lookup import Combiner
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.arrays import Value
from jaxstrategy._src.variables.abstract_variable import AbstractVariable
from jaxstrategy._src.variables.rows import checked_ids, looked_up
from jaxstrategy._src.variables.sharded_variable import ShardedVariable

Table: TypeAlias = ShardedVariable | AbstractVariable | jax.Array


def embedding_lookup(
    params: Table,
    ids: Value,
    max_norm: float | None = None,
    *,
    combiner: Combiner | None = None,
    weights: Value | None = None,
) -> jax.Array:
    """The rows of a table with these ids, or one row for each group of ids.

    Of a variable on parameter servers only these rows are read, each from the server
    that has it. With respect to a `ShardedVariable` that a function uses in no other
    way, `js.grad` gives `IndexedSlices`: the rows that were looked up.

    Shapes: table `[rows, ...]`, ids `[...]` -> `[*ids.shape, *table.shape[1:]]`, or
    with a combiner, without the last dimension of the ids.

    Args:
      params: a variable, a `ShardedVariable` or an array.
      ids: whole numbers from 0 to the number of rows. Of those that are traced, one
        that is no row gives what `jnp.take` fills in, NaN, and on a server an error.
      max_norm: rows that are longer are made this long; the table does not change.
      combiner: how the rows of the last dimension of `ids` become one: "sum", "mean"
        or "sqrtn", as in `js.sharded.lookup`. A negative id then stands for none, so
        that groups of several lengths can be filled up; a group without ids is zeros.
      weights: for each id, of the same shape. For "mean" and "sqrtn", an id of which
        it is not positive counts as none.

    Raises:
      IndexError: an id is no row.
      ValueError: a table without dimensions; no such combiner; weights of another
        shape, or without a combiner; `max_norm` is not positive.
      TypeError: the ids are no whole numbers; `params` is no table.

    >>> import jaxstrategy as js
    >>> shards = [js.Variable([[1.0, 2.0], [3.0, 4.0]]), js.Variable([[5.0, 6.0]])]
    >>> table = js.experimental.ShardedVariable(shards)
    >>> js.experimental.embedding_lookup(table, [2, 0])
    Array([[5., 6.],
           [1., 2.]], dtype=float32)
    >>> groups = [[0, 2], [1, -1]]  # [0, 2] and [1]
    >>> js.experimental.embedding_lookup(table, groups, combiner="mean")
    Array([[3., 4.],
           [3., 4.]], dtype=float32)
    """
    table = _checked_table(params)
    shape, has_groups = table.shape, combiner is not None
    name = getattr(table, "name", "params")
    numbers = checked_ids(ids, shape[0], name, are_padded=has_groups)
    each = lookup.check_combiner(combiner, numbers, weights)
    is_none = numbers < 0
    if each is not None and combiner != "sum":
        is_none |= each <= 0
    # Row 0 in the place of none: a server refuses what is no row.
    asked = jnp.where(is_none, 0, numbers) if has_groups else numbers
    is_sharded = isinstance(table, ShardedVariable)
    rows = table.rows_at(asked) if is_sharded else looked_up((table,), asked)
    rows = _shortened(rows, len(shape) - 1, max_norm)
    if combiner is None:
        return rows
    mask = is_none.reshape(*is_none.shape, *(1,) * (len(shape) - 1))
    rows = jnp.where(mask, jnp.zeros_like(rows), rows)
    return lookup.combined(rows, jnp.where(is_none, -1, numbers), combiner, each)


def _checked_table(params: Value) -> Table:
    """`params` as something that has rows."""
    if isinstance(params, (list, tuple)):
        raise TypeError(
            f"`params` was a {type(params).__name__} of {len(params)}; one variable or "
            "array was wanted. Shards that are one table, one's rows after the "
            "other's, are `js.experimental.ShardedVariable(shards)`."
        )
    is_variable = isinstance(params, (ShardedVariable, AbstractVariable))
    table = params if is_variable else lookup.array("params", params)
    if not table.ndim:
        raise ValueError(
            "`params` has no dimensions, and so no rows; [rows, ...] was wanted."
        )
    return table


def _shortened(rows: jax.Array, rank: int, max_norm: float | None) -> jax.Array:
    """Each row, of so many dimensions, at most as long as `max_norm`."""
    if max_norm is None:
        return rows
    if not isinstance(max_norm, Tracer) and not max_norm > 0:
        raise ValueError(f"`max_norm` was {shown(max_norm)}; more than 0 was wanted.")
    axes = tuple(range(rows.ndim - rank, rows.ndim))
    squares = (rows**2).sum(axes, keepdims=True)
    # The derivative of the root of 0 would be infinite.
    is_long = squares > max_norm**2
    norms = jnp.sqrt(jnp.where(is_long, squares, 1))
    return jnp.where(is_long, rows * (max_norm / norms), rows).astype(rows.dtype)
