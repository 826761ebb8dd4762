"""Rows of a table by their ids: `lookup`."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxstrategy._src.reductions.rows import row_numbers, table_rows
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.text import shown
from jaxstrategy._src.values.arrays import Value


def array(name: str, value: Value, wanted: str = "an array of numbers") -> jax.Array:
    """`value` as an array of numbers."""
    if isinstance(value, np.ndarray):
        mesh.check_range(value)
    try:
        numbers = mesh.array_of(value)
    except mesh.DtypeRangeError:
        raise
    except (TypeError, ValueError):  # objects; lists of several lengths
        numbers = None
    if numbers is None or not jnp.issubdtype(numbers.dtype, jnp.number):
        raise TypeError(f"`{name}` was {shown(value)}; {wanted} was wanted.")
    return numbers


def table_of(value: Value) -> jax.Array:
    """`value` as a table `[rows, ...]`."""
    table = array("table", value, "an array of numbers, such as `state.table`,")
    if not table.ndim or not table.shape[0]:
        raise ValueError(
            f"`table` has shape {table.shape}; one of [rows, ...] with at least one "
            "row was wanted."
        )
    return table


def ids_of(value: Value, rows: int, length: int) -> jax.Array:
    """`value` as ids of a table: -1 for none, `length` for all beyond the table."""
    ids = jnp.maximum(row_numbers(integers(value), length), -1)
    return jnp.where(ids < rows, ids, length)


def integers(value: Value) -> jax.Array:
    """Ids as an array of whole numbers, of its own dtype."""
    ids = array("ids", value, "an array of numbers, with groups filled up with -1,")
    if not ids.size and not hasattr(value, "dtype"):
        ids = ids.astype("int32")  # an empty list, to NumPy one of floats
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            f"`ids` are {ids.dtype}{list(ids.shape)}; whole numbers were wanted, the "
            "rows to look up, with -1 for none. Convert them, as in "
            '`ids.astype("int32")`.'
        )
    return ids


def checked_ids(
    ids: Value, rows: int, name: str, are_padded: bool = False
) -> jax.Array:
    """`ids` as an array of whole numbers."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(ids)):
        return integers(ids)
    with jax.ensure_compile_time_eval():  # in a trace, too
        found = integers(ids)
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


Combiner: TypeAlias = Literal["sum", "mean", "sqrtn"]


def check_combiner(
    combiner: str | None, ids: jax.Array, weights: Value | None
) -> jax.Array | None:
    """`weights` as an array like `ids`, None if none were given."""
    if combiner is not None and combiner not in get_args(Combiner):
        raise ValueError(
            f"`combiner` was {combiner!r}; 'sum', 'mean', 'sqrtn' or None was wanted."
        )
    if combiner is not None and not ids.ndim:
        raise ValueError(
            f"`combiner` was {combiner!r} for one id; ids [..., longest] were wanted, "
            "of which those of the last dimension are a group, filled up with -1."
        )
    if weights is None:
        return None
    if combiner is None:
        raise ValueError(
            "`weights` were given without a `combiner`; 'sum', 'mean' or 'sqrtn' was "
            "wanted."
        )
    checked = array("weights", weights)
    if jnp.issubdtype(checked.dtype, jnp.complexfloating):
        raise TypeError(f"`weights` are {checked.dtype}; real numbers were wanted.")
    if checked.shape != ids.shape:
        raise ValueError(
            f"`weights` have shape {checked.shape} and `ids` {ids.shape}; one weight "
            "for each id was wanted."
        )
    return checked


def combined(
    rows: jax.Array, ids: jax.Array, combiner: str, weights: jax.Array | None
) -> jax.Array:
    """Combines the rows of each group.

    Shapes: rows `[..., longest, *features]`, ids `[..., longest]`
    -> `[..., *features]`.
    """
    # Sums of 16 bits lose their last terms.
    kind = jnp.promote_types(rows.dtype, jnp.float32)
    weight = jnp.ones(ids.shape, kind) if weights is None else weights.astype(kind)
    weight = jnp.where(ids >= 0, weight, 0)
    features = rows.ndim - ids.ndim
    total = (rows.astype(kind) * _widened(weight, features)).sum(ids.ndim - 1)
    if combiner == "mean":
        total = _safe_quotient(total, _widened(weight.sum(-1), features))
    elif combiner == "sqrtn":
        squares = (weight**2).sum(-1)
        # The derivative of the root of 0 would be infinite.
        root = jnp.where(squares == 0, 0, jnp.sqrt(jnp.where(squares == 0, 1, squares)))
        total = _safe_quotient(total, _widened(root, features))
    is_whole = combiner == "sum" and weights is None
    is_float = jnp.issubdtype(rows.dtype, jnp.inexact)
    return total.astype(rows.dtype) if is_float or is_whole else total


def _safe_quotient(total: jax.Array, divisor: jax.Array) -> jax.Array:
    """`total / divisor`, and 0 for a group without ids."""
    return jnp.where(divisor == 0, 0, total / jnp.where(divisor == 0, 1, divisor))


def _widened(array: jax.Array, dimensions: int) -> jax.Array:
    return array.reshape(array.shape + (1,) * dimensions)


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
    whole = table_of(table)
    rows = whole.shape[0]
    return looked_up(whole, ids_of(ids, rows, rows), combiner, weights)


def looked_up(
    table: jax.Array,
    ids: jax.Array,
    combiner: Combiner | None,
    weights: Value | None,
) -> jax.Array:
    """`lookup` of ids from -1 to the length of the table."""
    checked = check_combiner(combiner, ids, weights)
    shape = (*ids.shape, *table.shape[1:])
    rows = table_rows(table, ids.reshape(-1)).reshape(shape)
    if combiner is None:
        return rows
    return combined(rows, ids, combiner, checked)


def rows_gradient(
    table: jax.Array,
    ids: jax.Array,
    gradient: Value,
    combiner: Combiner | None,
    weights: Value | None,
) -> jax.Array:
    """The gradient of each row, `[*ids.shape, *table.shape[1:]]`.

    `gradient` is that of the result of `looked_up`.
    """
    checked = check_combiner(combiner, ids, weights)
    shape = ids.shape if combiner is None else ids.shape[:-1]
    shape = (*shape, *table.shape[1:])
    gradients = array("row_gradients", gradient)
    if gradients.shape != shape:
        by = "" if combiner is None else f" with the combiner {combiner!r}"
        raise ValueError(
            f"`row_gradients` have shape {gradients.shape}; {shape} was wanted, the "
            f"shape of the rows that `lookup` gives for ids of shape {ids.shape}{by}."
        )
    if combiner is None:
        return gradients
    rows = jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype)
    # It is linear in the rows, whichever they are.
    _, back = jax.vjp(lambda rows: combined(rows, ids, combiner, checked), rows)
    return back(gradients.astype(table.dtype))[0]
