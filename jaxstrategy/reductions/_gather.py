"""One array per replica to one longer array on every replica."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy.replicas import _overflow
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.values._types import Leaf


def checked_axis(axis: int) -> int:
    """`axis` as an int.

    Raises:
      TypeError: it is not a whole number.
    """
    dimension = whole(axis)
    if dimension is None:
        raise TypeError(f"`axis` was {axis!r}; a whole number was wanted.")
    return dimension


def all_gather(value: Leaf, axis: int, replicas: Replicas) -> jax.Array:
    """Every replica's `value`, joined along dimension `axis` in replica order.

    Shapes: local `[n, ...]` -> `[num_replicas * n, ...]` for `axis=0`.

    Raises:
      ValueError: `value` is a scalar, or `axis` is out of range.
      TypeError: `axis` is not a whole number.
    """
    array = _overflow.array_of(value)
    dimension = checked_axis(axis)
    if array.ndim == 0:
        raise ValueError(
            "Scalars cannot be joined along an axis. Give each replica's value a "
            "dimension first, for example `value[None]`."
        )
    if not -array.ndim <= dimension < array.ndim:
        raise ValueError(
            f"`axis` is {axis}, out of range for a value with {array.ndim} dimensions "
            f"on each replica: use {-array.ndim} to {array.ndim - 1}."
        )
    if not replicas.collective_axes:
        return array
    axis = dimension % array.ndim
    if array.size == 0:  # XLA refuses to join nothing
        longer = array.shape[axis] * replicas.count
        shape = (*array.shape[:axis], longer, *array.shape[axis + 1 :])
        return jnp.zeros(shape, array.dtype)
    return lax.all_gather(array, replicas.collective_axes, axis=axis, tiled=True)
