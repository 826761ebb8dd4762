"""The type of an array: what has one, and how messages write it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np  # the launcher imports this folder, and needs no NumPy


class Shaped(Protocol):
    """An array, or what stands for one, such as a variable."""

    @property
    def dtype(self) -> np.dtype:
        """Of its elements."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of it."""
        ...


def array_type(dtype: object, shape: Iterable[object], comma: str = ",") -> str:
    """Dtype and shape, as JAX prints them.

    >>> array_type("float32", (3, 2))
    'float32[3,2]'
    """
    return f"{dtype}[{comma.join(map(str, shape))}]"
