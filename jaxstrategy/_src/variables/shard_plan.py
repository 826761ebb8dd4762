"""The shards that a partitioner makes of a new variable: `ShardPlan`."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import final

import jax
from jax.typing import DTypeLike

from jaxstrategy._src.replicas.random_keys import is_key
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.text.whole_numbers import several_whole
from jaxstrategy._src.values.types import Value
from jaxstrategy._src.variables.initial_program import InitialValue
from jaxstrategy._src.variables.initial_value import (
    Start,
    check_shape,
    given_shape,
    start_of,
)
from jaxstrategy._src.variables.sharding_choice import PartitionFunction

_PART_ARGUMENTS = "partition_shape", "partition_offset"


@final
class ShardPlan:
    """What each shard of a new variable starts with.

    Args:
      initial_value: of all of it, or a function of `partition_shape` and
        `partition_offset` that makes a part.
      lengths: the number of rows of each shard.
      like: the type of the whole.
      dtype: that the user wants.
      name: of the whole.
    """

    def __init__(
        self,
        initial_value: Start | Callable[..., Value],
        lengths: Sequence[int],
        like: jax.ShapeDtypeStruct,
        dtype: DTypeLike | None,
        name: str,
    ) -> None:
        self._initial = initial_value
        self._starts = list(itertools.accumulate(lengths, initial=0))
        self._shape = tuple(like.shape)
        self._dtype = dtype
        self._name = name

    def __iter__(self) -> Iterator[Value]:
        """The value of each shard, one after the other."""
        for start, stop in itertools.pairwise(self._starts):
            if not isinstance(self._initial, Start):
                part = self._made(start, stop)
                if part is not None:
                    yield part
                    continue
            assert isinstance(self._initial, Start), "a part has settled it"
            yield self._initial.rows(start, stop)

    def _made(self, start: int, stop: int) -> Value:
        """The part that the function makes; None if it has made all instead."""
        assert not isinstance(self._initial, Start), "it is a function"
        shape = (stop - start, *self._shape[1:])
        offset = (start, *(0,) * (len(shape) - 1))
        make = functools.partial(
            self._initial, partition_shape=shape, partition_offset=offset
        )
        part = start_of(make, self._dtype, self._name)
        if part.type.shape == shape:
            return part.array
        if start or part.type.shape != self._shape:
            raise ValueError(
                f"The initial value of variable {self._name!r} was asked for the part "
                f"of shape {shape} at {offset}, and is of shape {part.type.shape}. A "
                "function with `partition_shape` and `partition_offset` returns that "
                "part; without these it is called once, and returns all."
            )
        self._initial = part
        return None


def shard_plan(
    partitioner: PartitionFunction,
    initial_value: InitialValue,
    shape: Sequence[int] | None,
    dtype: DTypeLike | None,
    name: str,
) -> ShardPlan | Start:
    """The shards of a new variable; what it starts with if it is in one piece.

    Args:
      partitioner: says how many shards.
      initial_value: of the variable.
      shape: that the user says it has.
      dtype: likewise.
      name: of the variable.

    Raises:
      ValueError: no initial value; an answer of the partitioner that cannot be; a part
        of another shape.
      TypeError: the partitioner's answer is none; as `start_of`.
    """
    if initial_value is None:
        raise ValueError(
            f"Variable {name!r} was made without an initial value, in the scope of a "
            "strategy with a partitioner, which must know its shape. Give "
            "`initial_value`."
        )
    initial, like = _typed(initial_value, given_shape(shape, name), dtype, name)
    check_shape(shape, like, name)
    count = _number_of_shards(partitioner, like, name)
    if count == 1:
        if isinstance(initial, Start):
            return initial
        return start_of(initial, dtype, name)
    short, longer = divmod(like.shape[0], count)
    lengths = [short + (number < longer) for number in range(count)]
    return ShardPlan(initial, lengths, like, dtype, name)


def _typed(
    initial_value: InitialValue,
    shape: tuple[int, ...] | None,
    dtype: DTypeLike | None,
    name: str,
) -> tuple[Start | Callable[..., Value], jax.ShapeDtypeStruct]:
    """What makes the parts of a variable, and the type of all of it."""
    if callable(initial_value) and _takes_parts(initial_value):
        if shape is not None and dtype is not None:
            wanted = jax.dtypes.canonicalize_dtype(dtype)
            return initial_value, jax.ShapeDtypeStruct(shape, wanted)
        found = _traced_type(initial_value, dtype, name)
        if found is not None:
            return initial_value, found
    start = start_of(initial_value, dtype, name, may_divide=True)
    return start, start.type


def _takes_parts(function: Callable[..., Value]) -> bool:
    """Whether it can make a part of what it returns."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return False
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_any or all(name in parameters for name in _PART_ARGUMENTS)


def _traced_type(
    function: Callable[..., Value], dtype: DTypeLike | None, name: str
) -> jax.ShapeDtypeStruct | None:
    """The type of what it returns, which is not computed; None if it must be."""
    try:
        made = jax.eval_shape(lambda: jax.numpy.asarray(function(), dtype))
    except Exception:  # it looks at numbers; or fails, and will do so when called
        return None
    return jax.ShapeDtypeStruct(made.shape, made.dtype)


def _number_of_shards(
    partitioner: PartitionFunction, like: jax.ShapeDtypeStruct, name: str
) -> int:
    """How many shards there will be, not more than rows.

    Raises:
      ValueError: the answer does not fit.
      TypeError: it is none.
    """
    shape = tuple(like.shape)
    if not shape or not shape[0] or is_key(like.dtype):
        return 1
    answer = partitioner(shape, like.dtype)
    numbers = several_whole(answer)
    told = f"The partitioner of variable {name!r} of shape {shape} returned"
    if numbers is None:
        raise TypeError(
            f"{told} {shown(answer)}; a list of whole numbers was wanted, how many "
            "shards there are to be along each dimension."
        )
    is_wrong = not numbers or len(numbers) > len(shape) or numbers[0] < 1
    if is_wrong or any(number != 1 for number in numbers[1:]):
        raise ValueError(
            f"{told} {list(numbers)}; the number of shards was wanted, 1 or more, and "
            "1 for each other dimension: shards have rows."
        )
    return min(numbers[0], shape[0])
