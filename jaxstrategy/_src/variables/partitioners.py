"""Rules that divide variables into shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.text.whole_numbers import several_whole, whole


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
        """The number of parts along each dimension of `shape`.

        Args:
          shape: of a variable.
          dtype: of it.
          axis: the dimension that may be divided.

        Returns:
          As many numbers as `shape` has: 1 but for that of `axis`.

        Raises:
          NotImplementedError: the class does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say how a variable is divided. Define "
            "`__call__(self, shape, dtype, axis=0)`, or use FixedShardsPartitioner, "
            "MinSizePartitioner or MaxSizePartitioner."
        )


class FixedShardsPartitioner(Partitioner):
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
        self._num_shards = _positive(num_shards, "num_shards")

    def __call__(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0
    ) -> list[int]:
        """The number of parts along each dimension, not more than there are rows.

        Args:
          shape: of a variable.
          dtype: of it; plays no part.
          axis: the dimension that may be divided.
        """
        return _along(shape, axis, lambda rows: self._num_shards)


class MinSizePartitioner(Partitioner):
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
        self._min_shard_bytes = _positive(min_shard_bytes, "min_shard_bytes")
        self._max_shards = _positive(max_shards, "max_shards")
        self._bytes_per_string = _positive(bytes_per_string, "bytes_per_string")

    def __call__(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0
    ) -> list[int]:
        """The number of parts along each dimension, not more than there are rows.

        Args:
          shape: of a variable.
          dtype: of it.
          axis: the dimension that may be divided.
        """
        item = _item_size(dtype, self._bytes_per_string)

        def parts(rows: int) -> int:
            wanted = -(-math.prod(shape) * item // self._min_shard_bytes)
            return min(wanted, self._max_shards)

        return _along(shape, axis, parts)


class MaxSizePartitioner(Partitioner):
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
        self._max_shard_bytes = _positive(max_shard_bytes, "max_shard_bytes")
        is_limited = max_shards is not None
        self._max_shards = _positive(max_shards, "max_shards") if is_limited else None
        self._bytes_per_string = _positive(bytes_per_string, "bytes_per_string")

    def __call__(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0
    ) -> list[int]:
        """The number of parts along each dimension, not more than there are rows.

        Args:
          shape: of a variable.
          dtype: of it.
          axis: the dimension that may be divided.
        """
        item = _item_size(dtype, self._bytes_per_string)

        def parts(rows: int) -> int:
            of_a_row = max(math.prod(shape) * item // max(rows, 1), 1)
            wanted = -(-rows // max(self._max_shard_bytes // of_a_row, 1))
            return wanted if self._max_shards is None else min(wanted, self._max_shards)

        return _along(shape, axis, parts)


def _along(shape: Sequence[int], axis: int, parts: Callable[[int], int]) -> list[int]:
    """1 for each dimension, but along `axis` what `parts` says of its length."""
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
            f"`axis` was {shown(axis)}, but the shape is {lengths}; the number of one "
            "of its dimensions was wanted."
        )
    numbers[along] = max(1, min(parts(lengths[along]), lengths[along]))
    return numbers


def _item_size(dtype: DTypeLike, of_text: int) -> int:
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"`dtype` was {shown(dtype)}; a dtype was wanted.") from None
    return of_text if known.kind in "OSUT" else known.itemsize


def _positive(given: object, name: str) -> int:
    number = whole(given)
    if number is None:
        raise TypeError(f"`{name}` was {shown(given)}; a whole number was wanted.")
    if number < 1:
        raise ValueError(f"`{name}` was {number}; 1 or more was wanted.")
    return number
