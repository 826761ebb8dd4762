"""Batches for single replicas, from one input pipeline or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final

from jaxstrategy.inputs import _division
from jaxstrategy.inputs._batch import SourceBatch
from jaxstrategy.inputs._division import ReplicaRange, joined
from jaxstrategy.inputs._host_batch import HostBatch
from jaxstrategy.inputs._reader import Reader
from jaxstrategy.inputs.sources._source import Pass


@final
class PipelinesReader(Reader):
    """Reads a batch for each replica of this process.

    Args:
      pipelines: one, whose batches go to the replicas in turn, or one for each replica.
      replicas: those of this process.
    """

    is_for_one = True

    def __init__(self, pipelines: Sequence[Pass], replicas: ReplicaRange) -> None:
        super().__init__(replicas)
        self._pipelines = list(pipelines)
        self._each: int | None = None

    @property
    def passes(self) -> list[Pass]:
        """The pipelines."""
        return self._pipelines

    def set_each(self, each: int | None) -> None:
        """Sets the rows of each replica, before a batch tells them."""
        self._each = each

    def read(self) -> HostBatch | None:
        """A batch for each replica; one with copies for a replica that has none.

        Raises:
          ValueError: one has more rows than those of the first step, and there are
            several replicas.
        """
        number = self.number
        found = [self._read(i) for i in range(self.replicas.local)]
        if all(batch is None for batch in found):
            return None
        real = [batch for batch in found if batch is not None and batch.rows]
        filling = real[-1] if real else self.filling(number)
        if self._each is None:
            self._each = max(batch.rows for batch in real)
        each = self._each
        self._check_sizes(real, each)
        counts = [0 if batch is None else batch.rows for batch in found]
        if self.replicas.is_one:
            arrays = joined([batch.arrays for batch in found if batch], counts[0])
        else:
            arrays = joined(
                [
                    (batch if batch and batch.rows else filling).arrays
                    for batch in found
                ],
                each,
            )
        are_own = all(pipeline.are_own for pipeline in self._pipelines)
        return HostBatch(
            arrays=arrays, own_counts=tuple(counts), each=each, are_own=are_own
        )

    def counts_ahead(self, most: int) -> list[list[int]]:
        """Those of steps for all of whose replicas the pipelines are sure."""
        local, count = self.replicas.local, len(self._pipelines)
        rows = [each.rows_ahead(most * -(-local // count)) for each in self._pipelines]
        found: list[list[int]] = []
        places = [0] * count
        while len(found) < most:
            counts = []
            for replica in range(local):
                of = rows[replica % count]
                place = places[replica % count]
                if place >= len(of) or not 0 < of[place] <= (self._each or 0):
                    return found
                counts.append(of[place])
                places[replica % count] += 1
            found.append(counts)
        return found

    def _read(self, replica: int) -> SourceBatch | None:
        try:
            place = replica % len(self._pipelines)
            batch = self._next(next(self._pipelines[place]), place)
        except StopIteration:
            return None
        if len(self._pipelines) < self.replicas.local:  # asked again for this step
            batch = dataclasses.replace(batch, arrays=_division.copied(batch.arrays))
        return batch

    def _check_sizes(self, batches: Sequence[SourceBatch], each: int) -> None:
        for batch in batches:
            if batch.rows > each and not self.replicas.is_one:
                raise ValueError(
                    f"Batch {batch.number} has {batch.rows} rows, but no batch of the "
                    f"first step had more than {each}. Shapes are static: later "
                    "batches may be smaller, as the last one often is, but not larger."
                )
