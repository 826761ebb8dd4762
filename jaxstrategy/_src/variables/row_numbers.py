"""Numbers of rows that users give, checked where they are known."""

from __future__ import annotations

import jax
import numpy as np
from jax.core import Tracer

from jaxstrategy._src.sharded import table_arguments
from jaxstrategy._src.values.types import Value


def checked_ids(
    ids: Value, rows: int, name: str, are_padded: bool = False
) -> jax.Array:
    """`ids` as an array of whole numbers.

    Args:
      ids: numbers of rows, of any shape.
      rows: how many there are.
      name: of the variable.
      are_padded: whether a negative one stands for none.

    Raises:
      TypeError: they are no whole numbers.
      ValueError: numbers that no dtype of JAX holds.
      IndexError: one is no row; of one that is traced, nobody knows.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(ids)):
        return table_arguments.integers(ids)
    with jax.ensure_compile_time_eval():  # in a trace, too
        found = table_arguments.integers(ids)
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
