"""The rows of a batch, divided over the replicas.

All replicas have as many rows, the same in each step: what is missing is filled up with
copies of the last row, and counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy.inputs._batch import Array, SourceBatch
from jaxstrategy.replicas._replicas import Replicas


@dataclasses.dataclass(frozen=True)
class ReplicaRange:
    """The numbers of a process's replicas, among those of all.

    Attributes:
      total: how many there are.
      first: the number of this process's first.
      local: how many this process has; one after the other.
    """

    total: int
    first: int
    local: int

    @classmethod
    def of(cls, replicas: Replicas) -> ReplicaRange:
        """The numbers of this process's replicas."""
        own = replicas.own
        # Strategies sort devices by process, so that rows are read in one piece.
        assert own == tuple(range(own[0], own[-1] + 1)), "they follow each other"
        return cls(replicas.count, own[0], len(own))

    @property
    def are_all(self) -> bool:
        """Whether this process has all of them."""
        return self.local == self.total

    @property
    def is_one(self) -> bool:
        """Whether there is one, which gets each batch as it is."""
        return self.total == 1

    def filled(self, rows: int, each: int) -> int:
        """The number of rows a replica is given of a batch with so many for it.

        Args:
          rows: those that there are.
          each: those that the replicas of a step share.
        """
        return rows if self.is_one else each


@dataclasses.dataclass(frozen=True)
class Division:
    """The division of the rows of global batches.

    Attributes:
      replicas: over which.
      each: the rows of each replica.
    """

    replicas: ReplicaRange
    each: int

    @classmethod
    def of(cls, replicas: ReplicaRange, rows: int) -> Division:
        """A division of batches of up to so many rows."""
        return cls(replicas, -(-rows // replicas.total))

    @property
    def rows(self) -> int:
        """The rows of a batch that is filled up."""
        return self.each * self.replicas.total

    def own(self, rows: int) -> slice:
        """The rows of a batch with so many that go to this process.

        At least one, so that there is something to fill up with.
        """
        if self.replicas.is_one:
            return slice(0, rows)
        start = min(self.replicas.first * self.each, rows - 1)
        stop = min((self.replicas.first + self.replicas.local) * self.each, rows)
        return slice(start, max(stop, start + 1))

    def counts(self, rows: int) -> list[int]:
        """The number of rows that each of all replicas has of a batch with so many."""
        starts = range(0, self.rows, self.each)
        return [min(max(rows - start, 0), self.each) for start in starts]


def stacked(batch: SourceBatch, local: int, each: int) -> list[Any]:
    """The arrays of this process, `[local, each, ...]`, filled up with the last row."""
    return [_stacked(array, local, each) for array in batch.arrays]


def _stacked(array: Array, local: int, each: int) -> Array:
    if array.ndim == 0:  # of one replica
        return array.reshape(1)
    array = _with_rows(array, local * each, 0)
    return array.reshape(local, each, *array.shape[1:])


def _with_rows(array: Array, rows: int, axis: int) -> Array:
    """`array` with so many rows along `axis`, the last one repeated."""
    missing = rows - array.shape[axis]
    if not missing:
        return array
    numpy = jnp if isinstance(array, jax.Array) else np
    last = array[(slice(None),) * axis + (slice(-1, None),)]
    shape = (*array.shape[:axis], missing, *array.shape[axis + 1 :])
    return numpy.concatenate([array, numpy.broadcast_to(last, shape)], axis=axis)


def widened(arrays: Sequence[Any], each: int) -> list[Any]:
    """Arrays `[replica, rows, ...]`, or lists of them, with more rows for a replica."""
    return [
        widened(array, each)
        if isinstance(array, list)
        else array
        if array.ndim == 1  # scalars
        else _with_rows(array, each, 1)
        for array in arrays
    ]


def joined(versions: Sequence[Sequence[Any]], each: int) -> list[Any]:
    """The arrays of several replicas, `[rows, ...]`, as `[replica, each, ...]`.

    Of arrays on devices a list of `[1, each, ...]`, which stay where they are.
    """
    filled = [[_stacked(array, 1, each) for array in arrays] for arrays in versions]
    return [
        list(column)
        if any(isinstance(array, jax.Array) for array in column)
        else np.concatenate(column)
        for column in zip(*filled, strict=True)
    ]


def copied(arrays: Sequence[Any]) -> list[Any]:
    """`arrays` that stay as they are when a source overwrites its own."""
    return [np.array(a) if isinstance(a, np.ndarray) else a for a in arrays]
