"""Whole numbers that users give."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex, cast


def whole(given: object) -> int | None:
    """`given` as an int, None unless it is a whole number; a bool is none.

    NumPy's integers are whole numbers, and so are JAX's whose value is known.

    >>> whole(3), whole(np.int64(3)), whole(3.0), whole(True), whole("3")
    (3, 3, None, None, None)
    """
    if isinstance(given, bool):
        return None
    try:
        return operator.index(cast(SupportsIndex, given))
    except TypeError:
        return None


def several_whole(given: object) -> tuple[int, ...] | None:
    """The whole numbers that `given` holds, None if it holds anything else.

    >>> several_whole([2, 3]), several_whole(2), several_whole([2, 3.0])
    ((2, 3), None, None)
    """
    try:
        found = [whole(entry) for entry in cast(Iterable[object], given)]
    except TypeError:
        return None
    return None if None in found else tuple(cast(list[int], found))


def positive(name: str, given: object) -> int:
    """`given`, which is a whole number from 1 on.

    Args:
      name: of the argument, in messages.
      given: anything.

    Raises:
      TypeError: it is no whole number.
      ValueError: it is below 1.
    """
    number = whole(given)
    if number is None:
        raise TypeError(f"`{name}` was {given!r}; a whole number was wanted.")
    if number < 1:
        raise ValueError(f"`{name}` was {number}; 1 or more was wanted.")
    return number
