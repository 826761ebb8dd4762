"""The value that a new variable starts with: `Start`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeGuard, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxstrategy._src.replicas import mesh, overflow
from jaxstrategy._src.replicas.random_keys import is_key
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.text.whole_numbers import several_whole
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import Value
from jaxstrategy._src.variables.initial_program import (
    InitialProgram,
    InitialValue,
    traced,
)


@final
class Start:
    """The value that every copy of a new variable starts with.

    Args:
      value: an array of the host or of a device, or the program that makes one.

    Attributes:
      type: the shape and dtype of a copy, and where an array lies that was given.
    """

    def __init__(self, value: jax.Array | np.ndarray | InitialProgram) -> None:
        self._value = value
        if isinstance(value, InitialProgram):
            self.type = value.type
        else:
            where = value.sharding if isinstance(value, jax.Array) else None
            self.type = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where)

    @functools.cached_property
    def array(self) -> jax.Array:
        """All of it, of the shape of a copy, where JAX or the user has it."""
        value = self._value
        return value.whole() if isinstance(value, InitialProgram) else jnp.copy(value)

    def rows(self, start: int, stop: int) -> jax.Array | np.ndarray:
        """The rows from `start` to `stop`, of the host if the value is of it."""
        value = self._value
        return (value if isinstance(value, np.ndarray) else self.array)[start:stop]

    def on(self, sharding: NamedSharding) -> jax.Array:
        """A copy placed as `sharding` says; if it divides, no device has all of it."""
        value = self._value
        if sharding.is_fully_replicated:
            return mesh.broadcast(self.array, sharding)
        if isinstance(value, InitialProgram):
            return value.on(sharding)
        # Copied, so that no array of the user's shares its memory.
        copied = np.array if isinstance(value, np.ndarray) else jnp.copy
        return mesh.broadcast(copied(value), sharding)


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
    if may_divide and isinstance(initial_value, Callable):
        settle = functools.partial(_settled, dtype=dtype, name=name)
        initial_value = traced(initial_value, settle)
    if isinstance(initial_value, InitialProgram):
        return Start(initial_value)
    # In a step, too: what a variable holds outlives it, and must be no tracers.
    with jax.ensure_compile_time_eval():
        called = isinstance(initial_value, Callable)
        value = initial_value() if called else initial_value
        if may_divide and is_host_array(value):
            return Start(_on_host(value, dtype))
        start = _settled(value, dtype, name)
    if isinstance(start, Tracer):
        raise TypeError(
            f"Variable {name!r} was given a value of the step that makes it, which "
            "only the devices will know. Start with a constant, and assign."
        )
    return Start(start)


def given_shape(shape: Sequence[int] | None, name: str) -> tuple[int, ...] | None:
    """The shape that the user says variable `name` has, None if that is not said.

    Raises:
      TypeError: the user says something else than a shape.
    """
    found = None if shape is None else several_whole(shape)
    if found is None and shape is not None:
        raise TypeError(
            f"`shape` of variable {name!r} was {shown(shape)}; a list of whole numbers "
            "was wanted."
        )
    return found


def check_shape(
    wanted: Sequence[int] | None, found: jax.ShapeDtypeStruct, name: str
) -> None:
    """Raise unless the value of variable `name` has the shape that the user says.

    Raises:
      ValueError: it has another one.
      TypeError: the user says something else than a shape.
    """
    shape = given_shape(wanted, name)
    if shape is not None and shape != found.shape:
        raise ValueError(
            f"Variable {name!r} was made with `shape` {shape} and a value of shape "
            f"{found.shape}."
        )


def is_host_array(value: Value) -> TypeGuard[np.ndarray]:
    """Whether `value` is an array of NumPy that devices can hold."""
    return isinstance(value, np.ndarray) and value.dtype.kind not in "OSUMm"


def _on_host(value: np.ndarray, dtype: DTypeLike | None) -> np.ndarray:
    """`value` with the dtype that it is to have on devices."""
    if dtype is None:
        overflow.check_held(value)
    wanted = jax.dtypes.canonicalize_dtype(value.dtype if dtype is None else dtype)
    return value.astype(wanted, copy=False)


def _settled(value: Value, dtype: DTypeLike | None, name: str) -> jax.Array:
    """`value` as an array of the dtype that the variable is to have."""
    if isinstance(value, PerReplica):
        raise TypeError(
            f"Variable {name!r} was given a PerReplica to start with; every copy "
            "starts with the same value. Assign the versions afterwards."
        )
    try:
        start = overflow.array_of(value, dtype)
        if is_key(start.dtype):
            return start
        return start.astype(start.dtype)  # a Python number's dtype is settled here
    except overflow.NotHeldError as error:
        raise ValueError(f"Variable {name!r}: {error}") from None
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Variable {name!r} was given {shown(value)} to start with; an array, a "
            "number or a function that returns one was wanted."
        ) from error
