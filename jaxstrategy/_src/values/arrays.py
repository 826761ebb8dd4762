"""Questions about an array: whether it is placed, mirrored, traced, or donated."""

from __future__ import annotations

from typing import TypeGuard

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.errors import DonatedValueError
from jaxstrategy._src.replicas import mesh, overflow
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.types import Value

_NOT_TRACED = get_opaque_trace_state()


def is_traced() -> bool:
    """Whether JAX is tracing the code that asks."""
    return get_opaque_trace_state() != _NOT_TRACED


def is_staged() -> bool:
    """Whether JAX records what the code computes, of known numbers too, for later.

    It does under `jax.jit`, `jax.lax.scan`, `jax.checkpoint`, but not under `jax.grad`.
    """
    return is_traced() and isinstance(jax.lax.neg(np.int32(1)), Tracer)


def is_array(value: object) -> TypeGuard[jax.Array | np.ndarray | np.generic]:
    """Whether `value` is an array of JAX or NumPy (a scalar of theirs included)."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_mirrored(value: object) -> bool:
    """Whether `value` is an array placed whole on every replica of some strategy."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, Tracer)
        and mesh.is_replicated(value.sharding)
    )


def is_sharded(value: object) -> bool:
    """Whether `value` is a plain array that is divided over the replicas."""
    return is_placed(value) and mesh.is_split(value.sharding)


def as_array(value: Value, what: str) -> jax.Array | np.ndarray:
    """`value` as an array that devices can hold; 64-bit types as JAX is set up.

    Raises:
      TypeError: it is not an array or a number.
      ValueError: it has integers that JAX does not hold.
    """
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    if array.dtype == object and isinstance(value, int):
        raise overflow.NotHeldError(overflow.too_large(value))
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"`{what}` is {shown(value)}, which is not an array or a number and cannot "
            "be placed on a device."
        )
    overflow.check_held(array)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def is_placed(value: object) -> TypeGuard[jax.Array]:
    """Whether `value` is an array on devices, and not one that is being traced."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def has_place(value: object) -> TypeGuard[jax.Array]:
    """Whether `value` is an array on devices, or a type, which may say where it is."""
    return is_placed(value) or isinstance(value, jax.ShapeDtypeStruct)


def is_deleted(value: object) -> bool:
    """Whether `value` is an array whose memory was given to a step."""
    return is_placed(value) and value.is_deleted()


def check_alive(value: object, what: str) -> None:
    """Raise if `value` is an array whose memory was given to a step.

    Raises:
      DonatedValueError: it is. On JAX 0.10, computing with it may end the process.
    """
    if is_deleted(value):
        raise DonatedValueError(
            f"{what} was donated to an earlier call, which has reused its memory. Go "
            "on with the value that call returned, or leave the argument out of "
            "`donate_argnums`."
        )
