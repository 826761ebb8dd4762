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

from jaxstrategy.inputs._batch import Batch


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas, and those of this process among them.

    Attributes:
      total: how many there are.
      first: the number of this process's first.
      local: how many this process has; one after the other.
    """

    total: int
    first: int
    local: int

    @property
    def are_all(self) -> bool:
        """Whether this process has all of them."""
        return self.local == self.total


@dataclasses.dataclass(frozen=True)
class Division:
    """How the rows of global batches are divided.

    Attributes:
      replicas: over which.
      each: the rows of each replica.
    """

    replicas: Replicas
    each: int

    @classmethod
    def of(cls, replicas: Replicas, rows: int) -> Division:
        """For batches of up to so many rows."""
        return cls(replicas, -(-rows // replicas.total))

    @property
    def rows(self) -> int:
        """The rows of a batch that is filled up."""
        return self.each * self.replicas.total

    def own(self, rows: int) -> slice:
        """Which rows of a batch with so many go to this process.

        At least one, so that there is something to fill up with.
        """
        start = min(self.replicas.first * self.each, rows - 1)
        stop = min((self.replicas.first + self.replicas.local) * self.each, rows)
        return slice(start, max(stop, start + 1))

    def counts(self, rows: int) -> list[int]:
        """How many rows each of all replicas has of a batch with so many."""
        starts = range(0, self.rows, self.each)
        return [min(max(rows - start, 0), self.each) for start in starts]


def stacked(batch: Batch, local: int, each: int) -> list[Any]:
    """The arrays of this process, `[local, each, ...]`, filled up with the last row."""
    return [_stacked(array, local, each) for array in batch.arrays]


def _stacked(array: Any, local: int, each: int) -> Any:
    missing = local * each - array.shape[0]
    if missing:
        numpy = jnp if isinstance(array, jax.Array) else np
        last = numpy.broadcast_to(array[-1:], (missing, *array.shape[1:]))
        array = numpy.concatenate([array, last])
    return array.reshape(local, each, *array.shape[1:])


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


def mask(counts: Sequence[int], each: int) -> np.ndarray:
    """Which rows are real, `bool[replica, each]`."""
    return np.arange(each) < np.asarray(counts)[:, None]
