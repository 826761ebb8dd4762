"""What one process reads for one step: a `Share`, from a `Reader`."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from jaxstrategy.inputs._batch import Batch, Kind, checked
from jaxstrategy.inputs._division import Replicas
from jaxstrategy.inputs.sources._source import Pass, State


@dataclasses.dataclass(frozen=True)
class Share:
    """What one process reads for one step.

    Attributes:
      arrays: `[local replica, each, ...]`, filled up.
      counts: how many real rows each of its replicas has.
      each: how many rows each replica has, real or not.
      are_own: whether nobody else has the arrays.
    """

    arrays: list[Any]
    counts: list[int]
    each: int
    are_own: bool = False


class Reader(abc.ABC):
    """One pass over what this process reads.

    Args:
      replicas: those it reads for.

    Attributes:
      kind: what the batches have in common, when one was read.
      number: how many batches were read.
      print: a number that tells the last batch from others; None if none was read.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.kind: Kind | None = None
        self.print: int | None = None
        self.number = 0

    @abc.abstractmethod
    def read(self) -> Share | None:
        """The next share; None at the end."""

    @property
    @abc.abstractmethod
    def passes(self) -> list[Pass]:
        """What it reads from."""

    @abc.abstractmethod
    def set_each(self, each: int | None) -> None:
        """How many rows each replica has, before a batch says so."""

    def get_state(self) -> list[State]:
        """Where it is.

        Raises:
          TypeError: a source cannot be resumed.
        """
        return [each.get_state() for each in self.passes]

    def set_state(self, states: list[State], number: int, print: int | None) -> None:
        """Go on from a state.

        Args:
          states: one for each source.
          number: how many batches were read until then.
          print: of the last of them.

        Raises:
          ValueError: it is that of another dataset.
        """
        if len(states) != len(self.passes):
            raise ValueError(
                f"The state is of {len(states)} input pipelines, but here are "
                f"{len(self.passes)}."
            )
        last = None
        for each, state in zip(self.passes, states, strict=True):
            last = each.set_state(state)
        self.number, self.print = number, print
        if last is not None and self._checked(last, number - 1).fingerprint != print:
            raise ValueError(
                f"The state was saved after {number} batches, but batch {number - 1} "
                "of this dataset is another one than it was then. Only a dataset that "
                "gives the same batches in the same order can be resumed: fix the seed "
                "of its shuffling, or use a source that saves its state, such as Grain "
                "or `jaxstrategy.batches`."
            )

    def close(self) -> None:
        """Close the sources."""
        for each in self.passes:
            each.close()

    def _checked(self, tree: Any, number: int) -> Batch:
        batch = checked(tree, number)
        if self.kind is None:
            self.kind = Kind.of(batch)
        self.kind.check(batch)
        return batch

    def _next(self, tree: Any) -> Batch:
        """The batch that was read just now."""
        batch = self._checked(tree, self.number)
        self.number += 1
        self.print = batch.fingerprint
        return batch
