"""A dataset whose batches come already divided over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import final

from jaxstrategy._values import PyTree

Distribute = Callable[[PyTree], PyTree]


@final
class DistributedDataset:
    """Global batches in, per-replica batches out.

    Iterating over it iterates over the source and divides each batch over the replicas
    (see `Strategy.experimental_distribute_dataset`). A source that can be iterated
    again, such as a list, makes a dataset that can.
    """

    def __init__(self, source: Iterable[PyTree], distribute: Distribute) -> None:
        self._source = source
        self._distribute = distribute

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(iter(self._source), self._distribute)

    def __repr__(self) -> str:
        return f"DistributedDataset({type(self._source).__name__})"


@final
class DistributedIterator(Iterator[PyTree]):
    """One pass over a `DistributedDataset`."""

    def __init__(self, batches: Iterator[PyTree], distribute: Distribute) -> None:
        self._batches = batches
        self._distribute = distribute

    def __next__(self) -> PyTree:
        return self._distribute(next(self._batches))
