"""The array that a new variable starts with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

from jaxstrategy.replicas import _overflow
from jaxstrategy.replicas._random_keys import is_key
from jaxstrategy.text._shown import shown
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Value

InitialValue: TypeAlias = Value | Callable[[], Value]


def start_of(
    initial_value: InitialValue, dtype: DTypeLike | None, name: str
) -> jax.Array:
    """`initial_value`, or what it returns, as an array of one copy's shape.

    Args:
      initial_value: what the user gave, or a function without arguments that gives it.
      dtype: of the array; by default that of the value.
      name: of the variable.

    Raises:
      TypeError: a `PerReplica`, something traced, or no array or number.
      ValueError: a number that the dtype does not hold.
    """
    value = initial_value() if isinstance(initial_value, Callable) else initial_value
    if isinstance(value, PerReplica):
        raise TypeError(
            f"Variable {name!r} was given a PerReplica to start with; every copy "
            "starts with the same value. Assign the versions afterwards."
        )
    try:
        start = jnp.asarray(value, dtype)
        if not is_key(start.dtype):
            start = start.astype(start.dtype)  # a Python number's dtype is settled here
    except OverflowError:
        raise ValueError(
            f"Variable {name!r}: {_overflow.too_large(value, dtype)}"
        ) from None
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Variable {name!r} was given {shown(value)} to start with; an array, a "
            "number or a function that returns one was wanted."
        ) from error
    if isinstance(start, Tracer):
        raise TypeError(
            f"Variable {name!r} was given a value of the step that makes it, which "
            "only the devices will know. Start with a constant, and assign."
        )
    return start
