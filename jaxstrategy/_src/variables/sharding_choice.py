"""Partitioners, and the dimension along which a variable is sharded."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy._src.replicas.inner_axes import (
    WHOLE,
    InnerSpec,
    checked_spec,
    divided_dimensions,
    inner_spec,
)
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.state_sharding import LeafSharding, Shaped, StateSharding
from jaxstrategy._src.text import positive, several_whole, shown, whole


class Partitioner:
    """A function of a shape and a dtype that says how many parts there are to be.

    Subclasses define `__call__`; any function of a shape and a dtype will do, too.

    >>> import jaxstrategy as js
    >>> class Columns(js.experimental.partitioners.Partitioner):
    ...     def __call__(self, shape, dtype, axis=0):
    ...         return [1] * (len(shape) - 1) + [2]
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     w = js.Variable(jnp.zeros((3, 4)), sharding=Columns())
    >>> w.sharding.shard_shape(w.shape)
    (3, 2)
    """

    def __call__(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0
    ) -> list[int]:
        """The numbers of parts along the dimensions of `shape`: 1 but for `axis`."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how a variable is divided. Define "
            "`__call__(self, shape, dtype, axis=0)`, or use FixedShardsPartitioner, "
            "MinSizePartitioner or MaxSizePartitioner."
        )


class _OfOneDimension(Partitioner, abc.ABC):
    """Divides along one dimension, by its length and the bytes of all."""

    _bytes_per_string = 16

    def __call__(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0
    ) -> list[int]:
        """The number of parts along each dimension, not more than there are rows."""
        lengths = several_whole(shape)
        if lengths is None:
            raise TypeError(
                f"`shape` was {shown(shape)}; a list of whole numbers was wanted."
            )
        numbers = [1] * len(lengths)
        if not numbers:
            return numbers
        along = whole(axis)
        if along is None or not -len(lengths) <= along < len(lengths):
            raise ValueError(
                f"`axis` was {shown(axis)}, but the shape is {lengths}; the number of "
                "one of its dimensions was wanted."
            )
        try:
            known = jnp.dtype(dtype)
        except TypeError:
            raise TypeError(
                f"`dtype` was {shown(dtype)}; a dtype was wanted."
            ) from None
        is_text = known.kind in "OSUT"
        item = self._bytes_per_string if is_text else known.itemsize
        wanted = self._parts(lengths[along], math.prod(lengths) * item)
        numbers[along] = max(1, min(wanted, lengths[along]))
        return numbers

    @abc.abstractmethod
    def _parts(self, rows: int, size: int) -> int:
        """How many parts of so many rows, of so many bytes, there are to be."""


class FixedShardsPartitioner(_OfOneDimension):
    """Wants a fixed number of parts.

    Args:
      num_shards: how many; 1 leaves every variable whole.

    Raises:
      ValueError: it is less than 1.
      TypeError: it is no whole number.

    >>> from jaxstrategy.experimental import partitioners
    >>> partitioners.FixedShardsPartitioner(2)((10, 3), np.float32)
    [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = positive("num_shards", num_shards)

    def _parts(self, rows: int, size: int) -> int:
        return self._num_shards


class MinSizePartitioner(_OfOneDimension):
    """Wants as many parts as there can be of at least some size.

    A part may be a little smaller: bytes are divided, and rounded up.

    Args:
      min_shard_bytes: that size.
      max_shards: how many parts there are at most.
      bytes_per_string: the size of an element that has no fixed one.

    Raises:
      ValueError: a number is less than 1.
      TypeError: it is no whole number.

    >>> from jaxstrategy.experimental import partitioners
    >>> at_least_1_mb = partitioners.MinSizePartitioner(2**20, max_shards=8)
    >>> at_least_1_mb((1000, 64), np.float32), at_least_1_mb((100000, 64), np.float32)
    ([1, 1], [8, 1])
    """

    def __init__(
        self,
        min_shard_bytes: int = 256 << 10,
        max_shards: int = 1,
        bytes_per_string: int = 16,
    ) -> None:
        self._min_shard_bytes = positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = positive("max_shards", max_shards)
        self._bytes_per_string = positive("bytes_per_string", bytes_per_string)

    def _parts(self, rows: int, size: int) -> int:
        return min(-(-size // self._min_shard_bytes), self._max_shards)


class MaxSizePartitioner(_OfOneDimension):
    """Wants as few parts as there can be of at most some size, one row at least.

    Args:
      max_shard_bytes: that size.
      max_shards: how many parts there are at most, even if they are larger then.
      bytes_per_string: the size of an element that has no fixed one.

    Raises:
      ValueError: a number is less than 1.
      TypeError: it is no whole number.

    >>> from jaxstrategy.experimental import partitioners
    >>> partitioners.MaxSizePartitioner(8)((6, 1), np.float32)
    [3, 1]
    """

    def __init__(
        self,
        max_shard_bytes: int,
        max_shards: int | None = None,
        bytes_per_string: int = 16,
    ) -> None:
        self._max_shard_bytes = positive("max_shard_bytes", max_shard_bytes)
        is_limited = max_shards is not None
        self._max_shards = positive("max_shards", max_shards) if is_limited else None
        self._bytes_per_string = positive("bytes_per_string", bytes_per_string)

    def _parts(self, rows: int, size: int) -> int:
        of_a_row = max(size // max(rows, 1), 1)
        wanted = -(-rows // max(self._max_shard_bytes // of_a_row, 1))
        return wanted if self._max_shards is None else min(wanted, self._max_shards)


PartitionFunction: TypeAlias = Callable[[tuple[int, ...], np.dtype], Sequence[int]]
"""Of a shape and a dtype the number of parts along each dimension."""

VariableSharding: TypeAlias = (
    StateSharding | InnerSpec | int | Literal["whole"] | PartitionFunction | None
)
"""What users say of how one variable is divided."""


@dataclasses.dataclass(frozen=True)
class ShardingChoice:
    """What the user says of how one variable is divided."""

    name: str  # for messages, and as the path for a `StateSharding`
    given: VariableSharding = None  # None leaves it to the strategy

    def __post_init__(self) -> None:
        given = self.given
        known = given is None or isinstance(given, (StateSharding, InnerSpec))
        if not (known or self._is_whole or whole(given) is not None or callable(given)):
            raise TypeError(
                f"`sharding` of variable {self.name!r} was {shown(given)}; the number "
                "of the dimension to divide, 'whole', a `StateSharding`, a partitioner "
                "or a `PartitionSpec` over logical axes was wanted, or None for what "
                "the strategy does."
            )

    @property
    def divides(self) -> bool:
        """Whether the variable itself asks to be divided."""
        is_open = self.given is None or isinstance(self.given, InnerSpec)
        return not (is_open or self._is_whole)

    @property
    def _is_whole(self) -> bool:
        return isinstance(self.given, str) and self.given == "whole"

    def may_divide(self, replicas: Replicas) -> bool:
        """Whether a variable of some type would lie divided over these replicas."""
        is_inner = isinstance(self.given, InnerSpec)
        if is_inner and replicas.inner_axes:
            return True
        if replicas.parts == 1:
            return False
        if self.given is not None and not is_inner:
            return self.divides
        of_strategy = replicas.state_sharding
        return of_strategy is not None and of_strategy.shard == "state"

    def division(self, leaf: Shaped, replicas: Replicas) -> LeafSharding:
        """The division of the variable."""
        given, parts = self.given, replicas.parts
        taken = divided_dimensions(self.inner(leaf, replicas))
        if given is None or isinstance(given, InnerSpec):
            of_strategy = replicas.state_sharding
            if of_strategy is None or of_strategy.shard != "optimizer":
                return replicas.division(self.name, leaf, taken)
            # A variable does not say what it is for.
            why = "the strategy divides optimizer state, and it has no `sharding`"
            return LeafSharding(None, why)
        if isinstance(given, StateSharding):
            return given.division(self.name, leaf, parts, taken)
        if self._is_whole:
            return LeafSharding(None, "`sharding` was 'whole'")
        dimension = whole(given)
        if dimension is not None:
            return self._along(dimension, leaf, parts, taken)
        assert callable(given), "which was checked"
        return self._partitioned(given, leaf, parts, taken)

    def inner(self, leaf: Shaped, replicas: Replicas) -> InnerSpec:
        """The division of one copy over the devices of its replica."""
        if isinstance(self.given, InnerSpec):
            if not replicas.axes:
                return WHOLE
            what = f"`sharding` of variable {self.name!r}"
            return checked_spec(self.given, leaf.shape, replicas, what)
        return inner_spec(leaf, replicas)

    def _along(
        self, given: int, leaf: Shaped, parts: int, taken: Sequence[int]
    ) -> LeafSharding:
        rank = len(leaf.shape)
        if not -rank <= given < rank:
            raise ValueError(
                f"`sharding` of variable {self.name!r} was {given}, but its shape is "
                f"{tuple(leaf.shape)}; the number of one of its dimensions was wanted."
            )
        if is_key(leaf.dtype):
            raise ValueError(
                f"`sharding` of variable {self.name!r} was {given}, but it holds "
                "random keys, which stay whole. Leave `sharding` out."
            )
        dimension = given % rank
        if dimension in taken:
            raise ValueError(
                f"`sharding` of variable {self.name!r} was {given}, the dimension that "
                "the devices of each replica divide; another was wanted."
            )
        if leaf.shape[dimension] % parts:
            raise ValueError(
                f"`sharding` of variable {self.name!r} was {given}, but {parts} "
                f"replicas cannot divide dimension {dimension} of shape "
                f"{tuple(leaf.shape)} equally. Choose another dimension, or make it "
                f"longer: {-(-leaf.shape[dimension] // parts) * parts}."
            )
        return _unless_alone_or_empty(LeafSharding(dimension), leaf, parts)

    def _partitioned(
        self,
        partitioner: PartitionFunction,
        leaf: Shaped,
        parts: int,
        taken: Sequence[int],
    ) -> LeafSharding:
        shape = tuple(leaf.shape)
        if not shape:
            return LeafSharding(None, "it has no dimension to divide")
        if is_key(leaf.dtype):
            return LeafSharding(None, "random keys stay whole")
        numbers, told = asked(partitioner, shape, leaf.dtype, self.name, "parts")
        divided = [i for i, number in enumerate(numbers) if number > 1]
        is_wrong = len(numbers) > len(shape) or any(number < 1 for number in numbers)
        if is_wrong or len(divided) > 1:
            raise ValueError(
                f"{told} {list(numbers)}; for each dimension a number of parts was "
                "wanted that is 1 or, for one dimension, more."
            )
        if not divided:
            return LeafSharding(None, "its partitioner left it whole")
        (dimension,) = divided
        along = f"divide dimension {dimension}"
        if dimension in taken:
            return LeafSharding(None, f"the devices of each replica {along}")
        if shape[dimension] % parts:
            return LeafSharding(None, f"{parts} replicas cannot {along} of {shape}")
        return _unless_alone_or_empty(LeafSharding(dimension), leaf, parts)


def asked(
    partitioner: PartitionFunction,
    shape: tuple[int, ...],
    dtype: np.dtype,
    name: str,
    what: str,
) -> tuple[Sequence[int], str]:
    """What a partitioner says of a variable, and the beginning of a message of it."""
    answer = partitioner(shape, dtype)
    numbers = several_whole(answer)
    told = f"The partitioner of variable {name!r} of shape {shape} returned"
    if numbers is None:
        raise TypeError(
            f"{told} {shown(answer)}; a list of whole numbers was wanted, how many "
            f"{what} there are to be along each dimension."
        )
    return numbers, told


def _unless_alone_or_empty(
    sharding: LeafSharding, leaf: Shaped, parts: int
) -> LeafSharding:
    if parts == 1:
        return LeafSharding(None, "there is one replica")
    if not math.prod(leaf.shape):
        return LeafSharding(None, "it has no elements")
    return sharding
