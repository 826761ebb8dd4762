"""The values with which variables of TensorFlow 1 begin."""

from __future__ import annotations

import functools
import inspect
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxstrategy.text._shown import shown
from jaxstrategy.text._whole_numbers import several_whole, whole

Initializer: TypeAlias = Callable[..., ArrayLike] | ArrayLike | None


def initial_value(
    name: str,
    shape: Sequence[int] | int | None,
    dtype: DTypeLike | None,
    initializer: Initializer,
) -> tuple[Any, np.dtype | None]:
    """What `Variable` is made of: a value or a function of nothing, and a dtype.

    Raises:
      ValueError: there is no shape, or one besides a value; no default for the dtype.
    """
    kind = None if dtype is None else dtype_of(dtype)
    if callable(initializer) and shape is None:
        return initializer, kind or np.dtype(np.float32)
    if initializer is not None and not callable(initializer):
        if shape is not None:
            raise ValueError(
                "If `initializer` is a value, do not specify `shape`: that of "
                f"{name!r} was {shown(shape)}. Give a function of the shape, or only "
                "the value."
            )
        return initializer, kind
    if shape is None:
        raise ValueError(
            f"Shape of a new variable ({name}) must be fully defined, but no `shape` "
            "was given. Give it, or a value as `initializer`."
        )
    kind = kind or np.dtype(np.float32)
    make = _default(name, kind) if initializer is None else initializer
    return functools.partial(_called, make, name, shape_of(shape), kind), kind


def shape_of(given: object) -> tuple[int, ...]:
    """A shape, given as a number or several.

    Raises:
      TypeError: it is none.
      ValueError: a dimension is negative.
    """
    number = whole(given)
    found = several_whole(given) if number is None else (number,)
    if found is None:
        raise TypeError(f"`shape` was {shown(given)}; whole numbers were wanted.")
    if min(found, default=0) < 0:
        raise ValueError(
            f"`shape` was {shown(given)}; a new variable needs the size of each "
            "dimension, at least 0."
        )
    return found


def dtype_of(given: DTypeLike) -> np.dtype:
    """The dtype that an array of it has, as JAX is set up."""
    given = getattr(given, "as_numpy_dtype", given)  # of TensorFlow's own
    return np.dtype(jax.dtypes.canonicalize_dtype(given))


def _called(
    make: Callable[..., Any], name: str, shape: tuple[int, ...], dtype: np.dtype
) -> ArrayLike:
    """The value of a function that wants a key, or a dtype, or neither."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # some builtins have none
        return make(shape, dtype)
    if next(iter(parameters), None) in ("key", "rng"):
        return make(_key(name), shape, dtype)
    kinds = {parameter.kind for parameter in parameters.values()}
    if "dtype" in parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        return make(shape, dtype=dtype)
    return make(shape)


def _key(name: str) -> jax.Array:
    # Of the name alone: all processes of a job make the same, in any order.
    return jax.random.key(zlib.crc32(name.encode()) & 0x7FFFFFFF)


def _default(name: str, dtype: np.dtype) -> Callable[..., ArrayLike]:
    if jnp.issubdtype(dtype, jnp.floating):
        return _glorot_uniform
    if jnp.issubdtype(dtype, jnp.integer) or dtype == np.bool_:
        return np.zeros
    raise ValueError(
        f"An initializer for variable {name!r} of {dtype} is required: there is a "
        "default for real floating-point numbers, integers and bools only."
    )


def _glorot_uniform(
    key: jax.Array, shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    """Uniform up to sqrt(6 / (fan_in + fan_out)), also of scalars and vectors."""
    fans = shape[-2:] if len(shape) > 1 else (*shape, 1)[:1] * 2
    receptive = math.prod(shape[:-2])
    limit = math.sqrt(6 / max(1, receptive * sum(fans)))
    # In one dimension: of four, XLA compiles for 6 s on CPUs (JAX 0.10 and 0.12).
    flat = jax.random.uniform(key, (math.prod(shape),), dtype, -limit, limit)
    return flat.reshape(shape)
