"""The view that lower layers have of a replica that runs eagerly: `EagerReplica`."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax

from jaxstrategy._src.reductions.reduction import MetReduction
from jaxstrategy._src.values.types import PyTree


class Loans(Protocol):
    """What a function refers to instead of what it refers to otherwise."""

    def set(self) -> None:
        """Let the function refer to it."""
        ...

    def take_back(self) -> None:
        """Let it refer to what it referred to before."""
        ...


class EagerReplica(abc.ABC):
    """One replica that runs in a thread of its own, while the others wait.

    Attributes:
      number: of the replica, from 0.
      index: the same as an int32 array on the replica's device.
      reduction: what takes the place of the strategy's.
    """

    number: int
    index: jax.Array
    reduction: MetReduction

    @abc.abstractmethod
    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> PyTree:
        """This replica's part of what `merge_fn`, called once for all, returns."""

    @abc.abstractmethod
    def lending(self, loans: Loans) -> contextlib.AbstractContextManager[None]:
        """A `with` block with these loans, which are there while this replica runs."""
