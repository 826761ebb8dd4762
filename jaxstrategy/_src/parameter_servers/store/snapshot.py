"""What readers of a variable are given, and types of arrays: `Snapshot`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import final

import numpy as np

from jaxstrategy._src.text.shown import array_type

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


@final
class Snapshot:
    """What a variable holds, as readers see it without a copy."""

    def __init__(self) -> None:
        self._root: weakref.ref[np.ndarray] | None = None

    @property
    def is_held(self) -> bool:
        """Whether somebody still has what `of` returned."""
        return self._root is not None and self._root() is not None

    def of(self, value: np.ndarray) -> np.ndarray:
        """`value`, read-only and without a copy."""
        if not value.size:
            return np.empty_like(value)
        root = self._root() if self._root is not None else None
        if root is None:
            root = _root(value)
            self._root = weakref.ref(root)
        return root.view(value.dtype).reshape(value.shape)


def _root(value: np.ndarray) -> np.ndarray:
    """The bytes of `value`, as an array that lives as long as each view of it."""
    # bfloat16 and its kin have no `memoryview`, bytes have.
    raw = memoryview(value.reshape(-1).view(np.uint8))
    return np.frombuffer(raw.toreadonly(), np.uint8)
