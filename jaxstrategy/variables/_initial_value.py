"""The value that a new variable starts with: `Start`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxstrategy.contexts import _context
from jaxstrategy.replicas import _mesh, _overflow
from jaxstrategy.replicas._random_keys import is_key
from jaxstrategy.text._shown import shown
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Value
from jaxstrategy.variables._initial_program import (
    InitialProgram,
    InitialValue,
    known_or_traced,
)


@final
class Start:
    """The value that every copy of a new variable starts with.

    Args:
      value: an array of the host or of a device, or the program that makes one.

    Attributes:
      type: the shape and dtype of a copy.
    """

    def __init__(self, value: jax.Array | np.ndarray | InitialProgram) -> None:
        self._value = value
        is_made = not isinstance(value, InitialProgram)
        self.type = (
            jax.ShapeDtypeStruct(value.shape, value.dtype) if is_made else value.type
        )

    @functools.cached_property
    def array(self) -> jax.Array:
        """All of it, of the shape of a copy, where JAX or the user has it."""
        value = self._value
        return value.whole() if isinstance(value, InitialProgram) else jnp.copy(value)

    def on(self, sharding: NamedSharding) -> jax.Array:
        """A copy placed as `sharding` says; if it divides, no device has all of it."""
        value = self._value
        if sharding.is_fully_replicated:
            return _mesh.broadcast(self.array, sharding)
        if isinstance(value, InitialProgram):
            return value.on(sharding)
        # Copied, so that no array of the user's shares its memory.
        copied = np.array if isinstance(value, np.ndarray) else jnp.copy
        return _mesh.broadcast(copied(value), sharding)


def start_of(
    initial_value: InitialValue,
    dtype: DTypeLike | None,
    name: str,
    may_divide: bool = False,
) -> Start:
    """`initial_value`, or what it returns, as what a variable starts with.

    Args:
      initial_value: what the user gave, or a function without arguments that gives it.
      dtype: of the array; by default that of the value.
      name: of the variable.
      may_divide: whether no device might be to have all of it.

    Raises:
      TypeError: a `PerReplica`, something traced, or no array or number.
      ValueError: a number that the dtype does not hold.
    """
    value = initial_value
    if isinstance(initial_value, Callable):
        settle = functools.partial(_settled, dtype=dtype, name=name)
        value = (
            known_or_traced(initial_value, settle) if may_divide else initial_value()
        )
    if isinstance(value, InitialProgram):
        return Start(value)
    if may_divide and isinstance(value, np.ndarray):
        return Start(_on_host(value, dtype, name))
    start = _settled(value, dtype, name)
    if isinstance(start, Tracer):
        raise TypeError(
            f"Variable {name!r} was given a value of the step that makes it, which "
            "only the devices will know. Start with a constant, and assign."
        )
    return Start(start)


def _on_host(value: np.ndarray, dtype: DTypeLike | None, name: str) -> np.ndarray:
    """`value` with the dtype that it has on devices."""
    if dtype is None:
        _overflow.check_held(value)
    try:
        wanted = jax.dtypes.canonicalize_dtype(value.dtype if dtype is None else dtype)
        return value.astype(wanted, copy=False)
    except (TypeError, ValueError) as error:
        raise _no_array(value, name) from error


def _settled(value: Value, dtype: DTypeLike | None, name: str) -> jax.Array:
    """`value` as an array of the dtype that the variable is to have."""
    if isinstance(value, PerReplica):
        raise TypeError(
            f"Variable {name!r} was given a PerReplica to start with; every copy "
            "starts with the same value. Assign the versions afterwards."
        )
    try:
        start = jnp.asarray(value, dtype)
        if is_key(start.dtype):
            return start
        return start.astype(start.dtype)  # a Python number's dtype is settled here
    except OverflowError:
        raise ValueError(
            f"Variable {name!r}: {_overflow.too_large(value, dtype)}"
        ) from None
    except (TypeError, ValueError) as error:
        raise _no_array(value, name) from error


def _no_array(value: Value, name: str) -> TypeError:
    return TypeError(
        f"Variable {name!r} was given {shown(value)} to start with; an array, a "
        "number or a function that returns one was wanted."
    )
