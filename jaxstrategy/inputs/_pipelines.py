"""Batches for single replicas, from one input pipeline or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final

from jaxstrategy.inputs import _division
from jaxstrategy.inputs._batch import Batch
from jaxstrategy.inputs._division import Replicas, joined
from jaxstrategy.inputs._reader import Reader, Share
from jaxstrategy.inputs.sources._source import Pass


@final
class PipelinesReader(Reader):
    """Reads a batch for each replica of this process.

    Args:
      pipelines: one, whose batches go to the replicas in turn, or one for each replica.
      replicas: those of this process.
    """

    def __init__(self, pipelines: Sequence[Pass], replicas: Replicas) -> None:
        super().__init__(replicas)
        self._pipelines = list(pipelines)
        self._each: int | None = None

    @property
    def passes(self) -> list[Pass]:
        """The pipelines."""
        return self._pipelines

    def set_each(self, each: int | None) -> None:
        """How many rows each replica has, before a batch says so."""
        self._each = each

    def read(self) -> Share | None:
        """A batch for each replica; one with copies for a replica that has none.

        Raises:
          ValueError: one has more rows than the first.
        """
        local = self.replicas.local
        found = [self._read(i) for i in range(local)]
        real = [batch for batch in found if batch is not None]
        if not real:
            return None
        each = self._each
        assert each is not None, "a batch was read"
        return Share(
            arrays=joined([(batch or real[-1]).arrays for batch in found], each),
            counts=[0 if batch is None else batch.rows for batch in found],
            each=each,
            are_own=all(each.are_own for each in self._pipelines),
        )

    def _read(self, replica: int) -> Batch | None:
        try:
            batch = self._next(next(self._pipelines[replica % len(self._pipelines)]))
        except StopIteration:
            return None
        if self._each is None:
            self._each = batch.rows
        if batch.rows > self._each:
            raise ValueError(
                f"Batch {batch.number} has {batch.rows} rows, but the first had "
                f"{self._each}. Shapes are static: all batches but smaller ones, such "
                "as the last, need the size of the first."
            )
        if (
            len(self._pipelines) < self.replicas.local
        ):  # it is asked again for this step
            batch = dataclasses.replace(batch, arrays=_division.copied(batch.arrays))
        return batch
