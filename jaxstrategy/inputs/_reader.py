"""The reader of what this process feeds, step by step: `Reader`."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from jaxstrategy.inputs._batch import Array, BatchSpec, SourceBatch, checked
from jaxstrategy.inputs._division import ReplicaRange
from jaxstrategy.inputs._host_batch import HostBatch
from jaxstrategy.inputs.sources._source import Pass, State
from jaxstrategy.values._types import PyTree


def _last_row(array: Array) -> Array:
    """Some rows of `array`, the last one among them, that the source leaves alone."""
    if isinstance(array, np.ndarray) and array.ndim:
        return np.array(array[-1:])
    return array


class Reader(abc.ABC):
    """One pass over what this process reads.

    Args:
      replicas: those it reads for.

    Attributes:
      kind: what the batches have in common, when one was read.
      number: how many batches were read.
      prints: for each of `passes` a number that tells its last batch from others; None
        if none was read, or only a part of it.
    """

    # Whether a batch is for one replica.
    is_for_one = False

    def __init__(self, replicas: ReplicaRange) -> None:
        self.replicas = replicas
        self.kind: BatchSpec | None = None
        self.prints: dict[int, int | None] = {}
        self._with_rows: SourceBatch | None = None
        self.number = 0

    @abc.abstractmethod
    def read(self) -> HostBatch | None:
        """This process's part of the next step's batch; None at the end."""

    @abc.abstractmethod
    def counts_ahead(self, most: int) -> list[list[int]]:
        """The real rows of each own replica in the next steps, as far as they are sure.

        Only after a first batch was read.
        """

    @property
    @abc.abstractmethod
    def passes(self) -> list[Pass]:
        """The passes that it reads from."""

    @abc.abstractmethod
    def set_each(self, each: int | None) -> None:
        """Sets the rows of each replica, before a batch tells them."""

    def get_state(self) -> list[State]:
        """The places of its passes.

        Raises:
          TypeError: a source cannot be resumed.
        """
        return [each.get_state() for each in self.passes]

    def set_state(
        self, states: list[State], number: int, prints: list[int | None]
    ) -> None:
        """Go on from a state.

        Args:
          states: one for each source.
          number: how many batches were read until then.
          prints: of the last one of each source.

        Raises:
          ValueError: it is that of another dataset.
        """
        if len(states) != len(self.passes):
            raise ValueError(
                f"The state is of {len(states)} input pipelines, but here are "
                f"{len(self.passes)}."
            )
        self.number, self.prints = number, dict(enumerate(prints))
        for place, (each, state) in enumerate(zip(self.passes, states, strict=True)):
            self._check_last(each.set_state(state), self.prints.get(place))

    def _check_last(self, last: Any, print: int | None) -> None:
        """Raise if the last batch that was read is another one than it was."""
        if last is None or print is None:
            return
        number = self.number
        if self._checked(last, number - 1).fingerprint != print:
            raise ValueError(
                f"The state was saved after {number} batches, but batch {number - 1} "
                "of this dataset is another one than it was then. Only a dataset that "
                "gives the same batches in the same order can be resumed: fix the seed "
                "of its shuffling, or use a source that saves its state, such as Grain "
                "or `jaxstrategy.batches`."
            )

    def filling(self, number: int) -> SourceBatch:
        """Rows for a batch without any, to be counted as none.

        Raises:
          ValueError: there was no batch with rows.
        """
        if self._with_rows is None:
            raise ValueError(
                f"Batch {number} has no rows, and it is the first, so that it is not "
                "known how many a batch has. Leave empty batches out at the beginning "
                "of the dataset."
            )
        return self._with_rows.map(lambda array: array[-1:] if array.ndim else array)

    def close(self) -> None:
        """Close the sources."""
        for each in self.passes:
            each.close()

    def _checked(self, tree: PyTree, number: int) -> SourceBatch:
        batch = checked(tree, number, self.is_for_one)
        if self.kind is None:
            self.kind = BatchSpec.of(batch)
        self.kind.check(batch)
        return batch

    def _next(self, tree: PyTree, place: int = 0, is_part: bool = False) -> SourceBatch:
        """The batch that was read just now.

        Args:
          tree: what the source gave.
          place: of which of the passes it is.
          is_part: whether it is only this process's part of the batch.
        """
        batch = self._checked(tree, self.number)
        self.number += 1
        if batch.rows:
            self._with_rows = batch.map(_last_row)
        # Each process has another part, and all have one state.
        self.prints[place] = None if is_part else batch.fingerprint
        return batch
