"""The choice of the dimension along which a variable is divided over the replicas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from jaxstrategy._src.replicas.inner_placement import (
    WHOLE,
    InnerSpec,
    divided_dimensions,
    inner_spec,
)
from jaxstrategy._src.replicas.inner_specs import checked_spec
from jaxstrategy._src.replicas.random_keys import is_key
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.state_sharding import (
    Shaped,
    LeafSharding,
    StateSharding,
)
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.text.whole_numbers import several_whole, whole

PartitionFunction: TypeAlias = Callable[[tuple[int, ...], np.dtype], Sequence[int]]
"""Of a shape and a dtype the number of parts along each dimension."""

VariableSharding: TypeAlias = (
    StateSharding | InnerSpec | int | Literal["whole"] | PartitionFunction | None
)
"""What users say of how one variable is divided."""


@dataclasses.dataclass(frozen=True)
class ShardingChoice:
    """What the user says of how one variable is divided.

    Args:
      name: of the variable, for messages, and as the path for a `StateSharding`.
      given: the user's choice; None leaves it to the strategy.

    Raises:
      TypeError: it says nothing of how a variable is divided.
    """

    name: str
    given: VariableSharding = None

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
        return not (self.given is None or self._is_whole or self._is_inner)

    @property
    def _is_inner(self) -> bool:
        return isinstance(self.given, InnerSpec)

    @property
    def _is_whole(self) -> bool:
        return isinstance(self.given, str) and self.given == "whole"

    def may_divide(self, replicas: Replicas) -> bool:
        """Whether a variable of some type would lie divided over these replicas."""
        if isinstance(self.given, InnerSpec) and replicas.inner_axes:
            return True
        if replicas.parts == 1:
            return False
        if self.given is not None and not self._is_inner:
            return self.divides
        of_strategy = replicas.state_sharding
        return of_strategy is not None and of_strategy.shard == "state"

    def division(self, leaf: Shaped, replicas: Replicas) -> LeafSharding:
        """The division of the variable.

        Args:
          leaf: its type.
          replicas: those that are to keep it.

        Raises:
          ValueError: the dimension that was chosen is not there, or cannot be divided;
            a partitioner's answer does not fit the shape.
          TypeError: the dimension or the answer is none.
        """
        given, parts = self.given, replicas.parts
        taken = divided_dimensions(self.inner(leaf, replicas))
        if given is None or isinstance(given, InnerSpec):
            return self._of_strategy(leaf, replicas, taken)
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
        """The division of one copy over the devices of its replica.

        Args:
          leaf: its type, and where the initial value lies.
          replicas: those that are to keep it.

        Raises:
          ValueError: the spec that was given does not fit.
        """
        if isinstance(self.given, InnerSpec):
            if not replicas.axes:
                return WHOLE
            what = f"`sharding` of variable {self.name!r}"
            return checked_spec(self.given, leaf.shape, replicas, what)
        return inner_spec(leaf, replicas)

    def _of_strategy(
        self, leaf: Shaped, replicas: Replicas, taken: Sequence[int]
    ) -> LeafSharding:
        of_strategy = replicas.state_sharding
        if of_strategy is not None and of_strategy.shard == "optimizer":
            # A variable does not say what it is for.
            return LeafSharding(
                None, "the strategy divides optimizer state, and it has no `sharding`"
            )
        return replicas.division(self.name, leaf, taken)

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
                f"longer: {_next_multiple(leaf.shape[dimension], parts)}."
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
        answer = partitioner(shape, leaf.dtype)
        numbers = several_whole(answer)
        told = f"The partitioner of variable {self.name!r} of shape {shape} returned"
        if numbers is None:
            raise TypeError(
                f"{told} {shown(answer)}; a list of whole numbers was wanted, how many "
                "parts there are to be along each dimension."
            )
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
        if dimension in taken:
            return LeafSharding(
                None, f"the devices of each replica divide dimension {dimension}"
            )
        if shape[dimension] % parts:
            return LeafSharding(
                None, f"{parts} replicas cannot divide dimension {dimension} of {shape}"
            )
        return _unless_alone_or_empty(LeafSharding(dimension), leaf, parts)


def _unless_alone_or_empty(
    sharding: LeafSharding, leaf: Shaped, parts: int
) -> LeafSharding:
    if parts == 1:
        return LeafSharding(None, "there is one replica")
    if not math.prod(leaf.shape):
        return LeafSharding(None, "it has no elements")
    return sharding


def _next_multiple(length: int, parts: int) -> int:
    return -(-length // parts) * parts
