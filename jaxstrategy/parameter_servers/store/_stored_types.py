"""Shape and dtype of what a server holds or is given."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxstrategy.text._array_types import array_type

Type = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of an array."""


def types_of(arrays: Iterable[np.ndarray]) -> tuple[Type, ...]:
    """Shape and dtype of each."""
    return tuple((array.shape, array.dtype) for array in arrays)


def shown(*types: Type) -> str:
    """Types in messages.

    >>> shown(((2, 3), np.dtype("int32")), ((), np.dtype("bool")))
    'int32[2,3], bool[]'
    """
    return ", ".join(array_type(dtype, shape) for shape, dtype in types)
