"""The type of an array, as messages write it."""

from __future__ import annotations

from collections.abc import Iterable


def array_type(dtype: object, shape: Iterable[object], comma: str = ",") -> str:
    """Dtype and shape, as JAX prints them.

    >>> array_type("float32", (3, 2))
    'float32[3,2]'
    """
    return f"{dtype}[{comma.join(map(str, shape))}]"
