"""An iterator over one shard of a data set, on the worker that evaluates it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NoReturn, final

from jaxstrategy.coordinator._per_worker_builders import (
    DatasetBuilder,
    IteratorBuilder,
)
from jaxstrategy.coordinator._per_worker_dataset import PerWorkerDataset
from jaxstrategy.coordinator._per_worker_reading import NoElements
from jaxstrategy.inputs.sources._source import Dataset
from jaxstrategy.parameter_servers._worker_resource import WorkerResource
from jaxstrategy.parameter_servers._worker_surroundings import WorkerSurroundings
from jaxstrategy.scheduled._worker_argument import Element, IteratorArgument

DatasetOfShard = Callable[[int, int], Dataset]
"""Makes the dataset of a shard, of its number and of how many shards there are."""


@final
class ShardIterator(IteratorArgument):
    """Begins to read the shard on any worker that is given it.

    Args:
      make: makes its dataset.
      element: what each element is like.
    """

    def __init__(self, make: Callable[[], Dataset], element: Element) -> None:
        source = WorkerResource(DatasetBuilder(make))
        self._element = element
        self._resource = WorkerResource(IteratorBuilder(None), (source,))

    @property
    def element(self) -> Element:
        """What each element is like."""
        return self._element

    @property
    def resource(self) -> WorkerResource:
        """The iterator on each worker that has it."""
        return self._resource

    @property
    def tells_position(self) -> bool:
        """False: what was lost is read again from the beginning."""
        return False

    def keep_position(self, worker: int, position: object) -> NoReturn:
        """Not asked for."""
        raise AssertionError("no position is told")


def shard_iterators(
    make: DatasetOfShard, shards: int, surroundings: WorkerSurroundings
) -> Sequence[ShardIterator]:
    """An iterator for each shard.

    Raises:
      ValueError: there is no element in any, or `make` returns no dataset.
      Exception: what `make` raises.
    """
    makes = [functools.partial(make, shard, shards) for shard in range(shards)]
    element = _element(makes, surroundings)
    return [ShardIterator(each, element) for each in makes]


def _element(
    makes: Sequence[Callable[[], Dataset]], surroundings: WorkerSurroundings
) -> Element:
    """That of the first shard that is not empty."""
    for make in makes:
        dataset = PerWorkerDataset(make, surroundings, 1)
        with contextlib.suppress(NoElements):
            return dataset.element
    raise ValueError(
        f"`evaluate` was given a dataset without elements: none of its {len(makes)} "
        "shards has any."
    )
