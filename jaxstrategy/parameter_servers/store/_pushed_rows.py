"""The operands of a change of rows, as its program takes them."""

from __future__ import annotations

import numpy as np

from jaxstrategy.parameter_servers._aligned_memory import aligned_empty


def scatter_operands(
    name: str, rows: np.ndarray, values: np.ndarray, end: int
) -> tuple[np.ndarray, ...]:
    """Operands that have a power of two of rows, so that few programs are compiled.

    Args:
      name: one of `OF_ROWS`.
      rows: numbers of rows `[n]`, which the table has.
      values: `[n, ...]`.
      end: how many rows the table has; this number fills up.
    """
    if name == "scatter_update":
        rows, values = _last(rows, values)
    count = 1 << max(len(rows) - 1, 0).bit_length()
    if name != "scatter_div":
        return _filled(rows, count, end), _filled(values, count)
    unique, positions = np.unique(rows, return_inverse=True)
    # A position of `count` is none.
    return (
        _filled(unique, count, end),
        _filled(positions, count, count),
        _filled(values, count),
    )


def _last(rows: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row once, with the last of its values: XLA promises no order."""
    _, from_end = np.unique(rows[::-1], return_index=True)
    if len(from_end) == len(rows):
        return rows, values
    last = len(rows) - 1 - from_end
    return rows[last], values[last]


def _filled(array: np.ndarray, count: int, number: int | None = None) -> np.ndarray:
    """`count` rows, the last ones of this number; as int32 if there is one."""
    dtype = array.dtype if number is None else np.dtype(np.int32)
    if len(array) == count and array.dtype == dtype:
        return array
    filled = aligned_empty((count, *array.shape[1:]), dtype)
    filled[: len(array)] = array
    filled[len(array) :] = number or 0
    return filled
