"""Arrays of random keys, which JAX keeps apart from numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def is_key(dtype: Any) -> bool:
    """Whether arrays of this dtype hold random keys.

    >>> is_key(jax.random.key(0).dtype), is_key(np.dtype("uint32"))
    (True, False)
    """
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def as_numbers(array: Any) -> Any:
    """The numbers of which an array of random keys is made; any other array as it is.

    Shapes: keys `[...]` -> `[..., words]`.
    """
    return jax.random.key_data(array) if is_key(array.dtype) else array
