"""Rows of a table by their ids: `lookup`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxstrategy._src.reductions.rows import table_rows
from jaxstrategy._src.sharded import combiners, table_arguments
from jaxstrategy._src.sharded.combiners import Combiner
from jaxstrategy._src.values.types import Value


def lookup(
    table: Value,
    ids: Value,
    combiner: Combiner | None = None,
    *,
    weights: Value | None = None,
) -> jax.Array:
    """The rows of `table` with these ids, or one row for each group of ids.

    In a step of a strategy whose `StateSharding` divides the table along its rows, each
    replica sends its ids to the replicas that have the rows, which send the rows back;
    there is room for every id, so none is ever left out. Elsewhere the table is whole,
    and the rows are the same. Its gradient is that of the table, zero but for the rows
    that were looked up; an id that is there several times counts as often.

    Shapes: table `[rows, ...]`, ids `[...]` -> `[*ids.shape, *table.shape[1:]]`, or
    with a combiner, without the last dimension of the ids.

    Args:
      table: an array; integers too.
      ids: whole numbers. A negative one is none: zeros, and no gradient. One beyond the
        table gives what `jnp.take` fills in, NaN, and no gradient.
      combiner: how the rows of the last dimension of `ids` become one, as in
        `tf.nn.embedding_lookup_sparse`: their `"sum"`, `"mean"`, or `"sqrtn"`, the sum
        divided by the root of the number. Groups of several lengths are filled up with
        -1, which counts nowhere; a group without ids is zeros.
      weights: for each id, of the same shape: "mean" divides by their sum, "sqrtn" by
        the root of the sum of their squares.

    Raises:
      ValueError: a table without rows; no such combiner; weights of another shape, or
        without a combiner; numbers that no dtype of JAX holds.
      TypeError: the ids are no whole numbers; what was given is no array of numbers.

    >>> import jaxstrategy as js
    >>> table = jnp.arange(10.0).reshape(5, 2)
    >>> js.sharded.lookup(table, jnp.array([4, 0, -1]))
    Array([[8., 9.],
           [0., 1.],
           [0., 0.]], dtype=float32)
    >>> groups = jnp.array([[0, -1], [3, 4]])  # [0] and [3, 4]
    >>> js.sharded.lookup(table, groups, "mean")
    Array([[0., 1.],
           [7., 8.]], dtype=float32)
    """
    whole = table_arguments.table_of(table)
    rows = whole.shape[0]
    return looked_up(whole, table_arguments.ids_of(ids, rows, rows), combiner, weights)


def looked_up(
    table: jax.Array,
    ids: jax.Array,
    combiner: Combiner | None,
    weights: Value | None,
) -> jax.Array:
    """`lookup` of ids that are from -1 to the length of the table.

    Raises:
      ValueError: no such combiner, or weights that do not fit.
      TypeError: weights that are no real numbers.
    """
    each = combiners.check_combiner(combiner, ids, weights)
    shape = (*ids.shape, *table.shape[1:])
    rows = table_rows(table, ids.reshape(-1)).reshape(shape)
    if combiner is None:
        return rows
    return combiners.combined(rows, ids, combiner, each)


def rows_gradient(
    table: jax.Array,
    ids: jax.Array,
    gradient: Value,
    combiner: Combiner | None,
    weights: Value | None,
) -> jax.Array:
    """The gradient of each row, of one of what `looked_up` returned.

    Shapes: ids `[...]`, and a gradient of the shape of the result
    -> `[*ids.shape, *table.shape[1:]]`.

    Raises:
      ValueError: another shape; no such combiner, or weights that do not fit.
      TypeError: not an array of numbers.
    """
    each = combiners.check_combiner(combiner, ids, weights)
    shape = ids.shape if combiner is None else ids.shape[:-1]
    wanted = (*shape, *table.shape[1:])
    given = table_arguments.array("row_gradients", gradient)
    if given.shape != wanted:
        by = "" if combiner is None else f" with the combiner {combiner!r}"
        raise ValueError(
            f"`row_gradients` have shape {given.shape}; {wanted} was wanted, the shape "
            f"of the rows that `lookup` gives for ids of shape {ids.shape}{by}."
        )
    if combiner is None:
        return given
    rows = jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype)
    # It is linear in the rows, whichever they are.
    _, back = jax.vjp(lambda rows: combiners.combined(rows, ids, combiner, each), rows)
    return back(given.astype(table.dtype))[0]
