"""The arguments of lookups and updates, checked: tables, ids, rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.replicas import overflow
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.types import Value


def array(name: str, given: Value, wanted: str = "an array of numbers") -> jax.Array:
    """`given` as an array of numbers.

    Raises:
      TypeError: it is none.
      ValueError: numbers that no dtype of JAX holds.
    """
    if isinstance(given, np.ndarray):
        overflow.check_held(given)
    try:
        found = overflow.array_of(given)
    except overflow.NotHeldError:
        raise
    except (TypeError, ValueError):  # objects; lists of several lengths
        found = None
    if found is None or not jnp.issubdtype(found.dtype, jnp.number):
        raise TypeError(f"`{name}` was {shown(given)}; {wanted} was wanted.")
    return found


def table_of(given: Value) -> jax.Array:
    """`given` as a table `[rows, ...]`.

    Raises:
      TypeError: it is no array of numbers.
      ValueError: it has no rows; numbers that no dtype of JAX holds.
    """
    table = array("table", given, "an array of numbers, such as `state.table`,")
    if not table.ndim or not table.shape[0]:
        raise ValueError(
            f"`table` has shape {table.shape}; one of [rows, ...] with at least one "
            "row was wanted."
        )
    return table


def ids_of(given: Value, rows: int, length: int) -> jax.Array:
    """`given` as ids of a table: -1 for none, `length` for all beyond the table.

    Shapes: those given.

    Args:
      given: whole numbers.
      rows: how many the table has.
      length: how many are stored.

    Raises:
      TypeError: they are no whole numbers.
      ValueError: numbers that no dtype of JAX holds.
    """
    ids = integers(given)
    # Before they are cut to fewer bits: what is beyond must not become a row.
    ids = jnp.maximum(ids, -1 if jnp.issubdtype(ids.dtype, jnp.signedinteger) else 0)
    if jnp.iinfo(ids.dtype).max > rows:
        ids = jnp.minimum(ids, rows)
    ids = ids.astype("int32" if length < 2**31 else "int64")
    return ids if rows == length else jnp.where(ids < rows, ids, length)


def integers(given: Value) -> jax.Array:
    """Ids as an array of whole numbers, of its own dtype.

    Raises:
      TypeError: they are no whole numbers.
      ValueError: numbers that no dtype of JAX holds.
    """
    ids = array("ids", given, "an array of numbers, with groups filled up with -1,")
    if not ids.size and not hasattr(given, "dtype"):
        ids = ids.astype("int32")  # an empty list, to NumPy one of floats
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            f"`ids` are {ids.dtype}{list(ids.shape)}; whole numbers were wanted, the "
            "rows to look up, with -1 for none. Convert them, as in "
            '`ids.astype("int32")`.'
        )
    return ids
