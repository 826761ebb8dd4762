"""Values of arrays as text, whole or where they fit on a line."""

from __future__ import annotations

import jax
import numpy as np

from jaxstrategy._src.replicas.random_keys import is_key

_MOST_ELEMENTS = 12


def value_text(array: np.ndarray) -> str:
    """The value, shortened in the middle if it is large.

    >>> value_text(np.float32(0.1)), value_text(np.arange(3))
    ('0.1', '[0, 1, 2]')
    """
    if np.ndim(array):
        return np.array2string(array, separator=", ")
    return str(np.asarray(array)[()])


def line_of_value(array: jax.Array | np.ndarray) -> str:
    """The value on one line; "" if it does not fit.

    >>> line_of_value(np.ones((2, 2))), line_of_value(np.ones(100))
    ('[[1., 1.], [1., 1.]]', '')
    """
    if array.size > _MOST_ELEMENTS or is_key(array.dtype):
        return ""
    return " ".join(value_text(np.asarray(array)).split())
