"""Initial values of variables: programs that compute them, and shards."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_context
from jax.errors import (
    ConcretizationTypeError,
    NonConcreteBooleanIndexError,
    TracerArrayConversionError,
    TracerIntegerConversionError,
    UnexpectedTracerError,
)
from jax.extend import core
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxstrategy._src.contexts import context
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.mesh import as_numbers, is_key
from jaxstrategy._src.text import several_whole, shown
from jaxstrategy._src.values.arrays import Value
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.sharding_choice import PartitionFunction, asked

InitialValue: TypeAlias = Value | Callable[[], Value]
"""A value, or a function without arguments that returns one."""

# What JAX raises where a function looks at numbers that it traces, or at those of a
# step that is being traced.
_LOOKED_AT = (
    ConcretizationTypeError,
    NonConcreteBooleanIndexError,
    TracerArrayConversionError,
    TracerIntegerConversionError,
    UnexpectedTracerError,
)


@final
class Start:
    """The value that every copy of a new variable starts with.

    It is an array, or the traced function that makes one. Its `type` says where an
    array lies that was given.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._is_traced = hasattr(value, "out_avals")
        like = value.out_avals[0] if self._is_traced else value
        where = value.sharding if isinstance(value, jax.Array) else None
        self.type = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=where)

    @functools.cached_property
    def array(self) -> jax.Array:
        """All of it, of the shape of a copy, where JAX or the user has it."""
        if self._is_traced:  # operation by operation, as called
            return core.jaxpr_as_fun(self._value)()[0]
        return jnp.copy(self._value)

    def rows(self, start: int, stop: int) -> jax.Array | np.ndarray:
        """The rows from `start` to `stop`, of the host if the value is of it."""
        value = self._value
        return (value if isinstance(value, np.ndarray) else self.array)[start:stop]

    def on(self, sharding: NamedSharding) -> jax.Array:
        """A copy placed as `sharding` says; if it divides, no device has all of it."""
        value = self._value
        if sharding.is_fully_replicated:
            return mesh.broadcast(self.array, sharding)
        if not self._is_traced:
            # Copied, so that no array of the user's shares its memory.
            copied = np.array if isinstance(value, np.ndarray) else jnp.copy
            return mesh.broadcast(copied(value), sharding)
        # In the last place a part may differ from the same numbers made with all
        # others: what is left at the end of a row is computed by other instructions
        # than whole vectors are (CPU, JAX 0.10 and 0.12). So smaller ones are made
        # whole. With several processes it is the array of the first one's function.
        size = math.prod(self.type.shape) * self.type.dtype.itemsize
        if not mesh.is_large(size) or not _is_everywhere(value, sharding):
            return mesh.broadcast(self.array, sharding)
        return jax.jit(core.jaxpr_as_fun(value), out_shardings=[sharding])()[0]


def _is_everywhere(traced: Any, sharding: NamedSharding) -> bool:
    """Whether the functions of all processes compute the same."""
    if sharding.is_fully_addressable:
        return True
    if any(map(mesh.is_spread, traced.consts)):
        return False
    texts = [str(traced).encode()]
    texts += [np.asarray(as_numbers(each)).tobytes() for each in traced.consts]
    return mesh.are_equal(b"".join(texts), sharding)


def traced(
    fn: Callable[[], Value], settled: Callable[[Value], jax.Array]
) -> InitialValue | Start:
    """The program that makes what `fn` returns, or that itself if it is known.

    Also `fn`, if it must be called as it is: it looks at numbers, or those of a step.
    """
    known: list[Value] = []

    def compute() -> list[jax.Array]:
        value = fn()
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            known.append(value)
            return []
        return [settled(value)]

    try:
        # In a step, too, whose own trace must not have what `fn` computes.
        with eval_context(), context.entered(is_initial=True):
            closed = jax.make_jaxpr(compute)()
    except _LOOKED_AT:
        return fn
    if any(isinstance(each, Tracer) for each in closed.consts):  # of a step
        return fn
    return known[0] if known else Start(closed)


def start_of(
    initial_value: InitialValue,
    dtype: DTypeLike | None,
    name: str,
    may_divide: bool = False,
) -> Start:
    """`initial_value`, or what it returns, as what a variable starts with."""
    if may_divide and isinstance(initial_value, Callable):
        initial_value = traced(initial_value, lambda x: _settled(x, dtype, name))
    if isinstance(initial_value, Start):
        return initial_value
    # In a step, too: what a variable holds outlives it, and must be no tracers.
    with jax.ensure_compile_time_eval():
        called = isinstance(initial_value, Callable)
        value = initial_value() if called else initial_value
        if may_divide and is_host_array(value):
            if dtype is None:
                mesh.check_range(value)
            wanted = value.dtype if dtype is None else dtype
            wanted = jax.dtypes.canonicalize_dtype(wanted)
            return Start(value.astype(wanted, copy=False))
        start = _settled(value, dtype, name)
    if isinstance(start, Tracer):
        raise TypeError(
            f"Variable {name!r} was given a value of the step that makes it, which "
            "only the devices will know. Start with a constant, and assign."
        )
    return Start(start)


def given_shape(shape: Sequence[int] | None, name: str) -> tuple[int, ...] | None:
    """The shape that the user says variable `name` has, None if that is not said."""
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
    """Raise unless the value of variable `name` has the shape that the user says."""
    shape = given_shape(wanted, name)
    if shape is not None and shape != found.shape:
        raise ValueError(
            f"Variable {name!r} was made with `shape` {shape} and a value of shape "
            f"{found.shape}."
        )


def is_host_array(value: Value) -> TypeGuard[np.ndarray]:
    """Whether `value` is an array of NumPy that devices can hold."""
    return isinstance(value, np.ndarray) and value.dtype.kind not in "OSUMm"


def _settled(value: Value, dtype: DTypeLike | None, name: str) -> jax.Array:
    """`value` as an array of the dtype that the variable is to have."""
    if isinstance(value, PerReplica):
        raise TypeError(
            f"Variable {name!r} was given a PerReplica to start with; every copy "
            "starts with the same value. Assign the versions afterwards."
        )
    try:
        start = mesh.array_of(value, dtype)
        if is_key(start.dtype):
            return start
        return start.astype(start.dtype)  # a Python number's dtype is settled here
    except mesh.DtypeRangeError as error:
        raise ValueError(f"Variable {name!r}: {error}") from None
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Variable {name!r} was given {shown(value)} to start with; an array, a "
            "number or a function that returns one was wanted."
        ) from error


def _shards(
    initial: Start | Callable[..., Value],
    lengths: Sequence[int],
    whole: tuple[int, ...],
    dtype: DTypeLike | None,
    name: str,
) -> Iterator[Value]:
    """The value of each shard of a new variable, one after the other."""
    starts = itertools.accumulate(lengths, initial=0)
    for start, stop in itertools.pairwise(starts):
        if not isinstance(initial, Start):
            shape, offset = (stop - start, *whole[1:]), (start, *(0,) * len(whole[1:]))
            make = functools.partial(
                initial, partition_shape=shape, partition_offset=offset
            )
            part = start_of(make, dtype, name)
            if part.type.shape == shape:
                yield part.array
                continue
            if start or part.type.shape != whole:
                raise ValueError(
                    f"The initial value of variable {name!r} was asked for the part of "
                    f"shape {shape} at {offset}, and is of shape {part.type.shape}. A "
                    "function with `partition_shape` and `partition_offset` returns "
                    "that part; without these it is called once, and returns all."
                )
            initial = part  # it has made all instead
        yield initial.rows(start, stop)


def shard_plan(
    partitioner: PartitionFunction,
    initial_value: InitialValue,
    shape: Sequence[int] | None,
    dtype: DTypeLike | None,
    name: str,
) -> Iterator[Value] | Start:
    """The values of the shards of a new variable; its start if it is in one piece."""
    if initial_value is None:
        raise ValueError(
            f"Variable {name!r} was made without an initial value, in the scope of a "
            "strategy with a partitioner, which must know its shape. Give "
            "`initial_value`."
        )
    said, initial, like = given_shape(shape, name), initial_value, None
    if callable(initial) and _takes_parts(initial):
        if said is not None and dtype is not None:
            wanted = jax.dtypes.canonicalize_dtype(dtype)
            like = jax.ShapeDtypeStruct(said, wanted)
        else:
            with contextlib.suppress(Exception):  # it looks at numbers; or will fail
                like = jax.eval_shape(lambda: jnp.asarray(initial_value(), dtype))
    if like is None:
        initial = start_of(initial_value, dtype, name, may_divide=True)
        like = initial.type
    check_shape(shape, like, name)
    whole = tuple(like.shape)
    count = 1
    if whole and whole[0] and not is_key(like.dtype):
        numbers, told = asked(partitioner, whole, like.dtype, name, "shards")
        is_wrong = not numbers or len(numbers) > len(whole) or numbers[0] < 1
        if is_wrong or any(number != 1 for number in numbers[1:]):
            raise ValueError(
                f"{told} {list(numbers)}; the number of shards was wanted, 1 or more, "
                "and 1 for each other dimension: shards have rows."
            )
        count = min(numbers[0], whole[0])
    if count == 1:
        is_made = isinstance(initial, Start)
        return initial if is_made else start_of(initial, dtype, name)
    short, longer = divmod(whole[0], count)
    lengths = [short + (number < longer) for number in range(count)]
    return _shards(initial, lengths, whole, dtype, name)


def _takes_parts(function: Callable[..., Value]) -> bool:
    """Whether it can make a part of what it returns."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return False
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_any or {"partition_shape", "partition_offset"} <= parameters.keys()
