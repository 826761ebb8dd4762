"""The choice of the state that is sharded over the replicas: `StateSharding`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias, final

import jax
import numpy as np

from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.text import whole, with_bytes


class Shaped(Protocol):
    """An array, or the type of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


ChooseDimension: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], int | None]
"""A user's choice of the dimension to shard, from the path and type of an array."""


@final
@dataclasses.dataclass(frozen=True)
class LeafSharding:
    """The division of one array over the replicas.

    Attributes:
      dimension: the one that is divided into equal parts, one for each replica; None if
        each replica has the whole array.
      reason: why it is whole, in words.
    """

    dimension: int | None
    reason: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether each device holds all of it."""
        return self.dimension is None


@final
@dataclasses.dataclass(frozen=True)
class StateSharding:
    """The part of the state that is sharded: each replica keeps 1/N of it.

    Steps, their results and their numbers are those of whole state: only where an array
    lies is another thing, and what a step sends. Shapes are the logical ones.

    Attributes:
      shard: `"state"`: every large array that is equal on all replicas, parameters and
        optimizer state; `"optimizer"`: those that no replica's own computation reads,
        such as the moments of Adam, and not the parameters. A `Variable` says of itself
        that it is divided then (`sharding=`): nothing tells that it is an optimizer's.
      min_bytes: smaller arrays stay whole.
      dimension: chooses, of the path of an array in its argument (text such as
        `".params['Dense_0']['kernel']"`; the name of a variable) and its type, the
        dimension to divide, or None to leave it whole. By default the longest that the
        number of replicas divides, the first of equal ones.

    Raises:
      ValueError: `shard` is neither; a negative size.
      TypeError: the size is no number; `dimension` cannot be called.

    >>> import jaxstrategy as js
    >>> js.StateSharding("optimizer").min_bytes
    262144
    """

    shard: Literal["optimizer", "state"] = "state"
    min_bytes: int = 256 * 1024
    dimension: ChooseDimension | None = None

    def __post_init__(self) -> None:
        if self.shard not in ("optimizer", "state"):
            raise ValueError(
                f"`shard` was {self.shard!r}; 'optimizer' (what only the optimizer "
                "reads) or 'state' (parameters too) was wanted."
            )
        size = whole(self.min_bytes)
        if size is None or size < 0:
            error = ValueError if isinstance(self.min_bytes, int) else TypeError
            raise error(
                f"`min_bytes` was {self.min_bytes!r}; a number of bytes was wanted, "
                "or 0 to divide every array that can be."
            )
        object.__setattr__(self, "min_bytes", size)
        if self.dimension is not None and not callable(self.dimension):
            raise TypeError(
                f"`dimension` was {self.dimension!r}; a function of the path and the "
                "type of an array was wanted, which returns a dimension or None. For "
                "the same one everywhere: `lambda path, leaf: 0`."
            )

    def division(
        self, path: str, leaf: Shaped, parts: int, taken: Sequence[int] = ()
    ) -> LeafSharding:
        """The division of an array into so many parts.

        Args:
          path: of the array, for `dimension`.
          leaf: the array, or its type.
          parts: how many there are to be, one for each replica.
          taken: dimensions that the devices of each replica divide.

        Raises:
          ValueError: `dimension` chose one that the array has not, or that cannot be
            divided into so many parts.
          TypeError: it returned something else.
        """
        if self.dimension is None or not self.is_divisible(leaf, parts):
            return self.usual_division(leaf, parts, taken)
        return self._chosen(path, leaf, parts, taken)

    def usual_division(
        self, leaf: Shaped, parts: int, taken: Sequence[int] = ()
    ) -> LeafSharding:
        """As `division`, without asking `dimension`."""
        if (reason := self._reason_against(leaf, parts)) is not None:
            return LeafSharding(None, reason)
        # The longest is seldom that of stacked layers; only the others can be gathered
        # layer by layer.
        fitting = [i for i in _fitting(leaf, parts) if i not in taken]
        if not fitting:
            return LeafSharding(None, "the devices of each replica divide it")
        return LeafSharding(max(fitting, key=lambda i: leaf.shape[i]))

    def is_divisible(self, leaf: Shaped, parts: int) -> bool:
        """Whether an array can be divided; `dimension` may leave it whole."""
        return self._reason_against(leaf, parts) is None

    def _reason_against(self, leaf: Shaped, parts: int) -> str | None:
        """Why an array of this type stays whole; None if it need not."""
        if parts == 1:
            return "there is one replica"
        if is_key(leaf.dtype):
            return "random keys stay whole"
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        if size < self.min_bytes or not size:
            return (
                f"{with_bytes(size)}, below `min_bytes` ({with_bytes(self.min_bytes)})"
            )
        if not _fitting(leaf, parts):
            return f"no dimension of {tuple(leaf.shape)} divides by {parts}"
        return None

    def _chosen(
        self, path: str, leaf: Shaped, parts: int, taken: Sequence[int]
    ) -> LeafSharding:
        """The user's choice, checked."""
        assert self.dimension is not None, "the caller has looked"
        value = self.dimension(path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        if value is None:
            return LeafSharding(None, "`dimension` left it whole")
        chosen = whole(value)
        if chosen is None:
            raise TypeError(
                f"`dimension` returned {value!r} for `{path}`; the number of a "
                "dimension was wanted, or None to leave the array whole."
            )
        rank = len(leaf.shape)
        if not -rank <= chosen < rank or leaf.shape[chosen] % parts:
            raise ValueError(
                f"`dimension` returned {chosen} for `{path}` of shape {leaf.shape}; "
                f"one that {parts} replicas can divide was wanted, or None to leave "
                "the array whole."
            )
        if chosen % rank in taken:
            raise ValueError(
                f"`dimension` returned {chosen} for `{path}`, the dimension that the "
                "devices of each replica divide; another was wanted, or None to leave "
                "to each replica the whole array."
            )
        return LeafSharding(chosen % rank)


def _fitting(leaf: Shaped, parts: int) -> list[int]:
    return [i for i, length in enumerate(leaf.shape) if length % parts == 0]


def checked_sharding(value: object) -> StateSharding | None:
    """`value`, if it says which state is divided."""
    if value is None or isinstance(value, StateSharding):
        return value
    raise TypeError(
        f"`sharding` was {value!r}; a `StateSharding` was wanted, for example "
        "`js.StateSharding('state')`."
    )
