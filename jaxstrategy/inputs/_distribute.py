"""From what users give to a `DistributedDataset`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax

from jaxstrategy.inputs._dataset import DistributedDataset
from jaxstrategy.inputs._division import ReplicaRange
from jaxstrategy.inputs._global import GlobalReader
from jaxstrategy.inputs._input_options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from jaxstrategy.inputs._pipelines import PipelinesReader
from jaxstrategy.inputs._steps import Steps
from jaxstrategy.inputs._transfer import Transfer
from jaxstrategy.inputs.sources._choose import as_source
from jaxstrategy.inputs.sources._source import Dataset, Source
from jaxstrategy.processes._agreement import Agreement
from jaxstrategy.replicas._replicas import Replicas


class Feeding:
    """Makes datasets whose batches are divided over the replicas of a strategy.

    Args:
      replicas: all of them.
      agree: makes an agreement with the other processes, for one pass.
    """

    def __init__(
        self,
        replicas: Replicas,
        agree: Callable[[], Agreement],
    ) -> None:
        self._fed = ReplicaRange.of(replicas)
        self._agree = agree
        self._transfer = Transfer(replicas, self._fed)

    def of_dataset(self, dataset: Dataset, options: InputOptions) -> DistributedDataset:
        """Global batches, divided.

        Raises:
          ValueError: `options` ask for a pipeline for each replica.
          TypeError: `dataset` is nothing that batches can be read from.
        """
        refuse_for_each_replica(options)
        source = as_source(dataset)

        def start() -> Steps:
            reader = GlobalReader(source.start(), self._fed)
            return Steps(reader, self._agree(), options.remainder)

        # A source knows its number of batches, not how many are too small.
        length = _unknown
        if not options.leaves_out:
            length = functools.partial(_length_of, source)
        return DistributedDataset(start, self._transfer, options, source.name, length)

    def of_function(
        self, function: Callable[[InputContext], Dataset], options: InputOptions
    ) -> DistributedDataset:
        """The batches of an input function, one for each replica.

        Raises:
          TypeError: `function` is none, or gives nothing that can be read from.
        """
        sources = [as_source(function(each)) for each in self._contexts(options)]

        def start() -> Steps:
            passes = [source.start() for source in sources]
            reader = PipelinesReader(passes, self._fed)
            return Steps(reader, self._agree(), options.remainder)

        name = getattr(function, "__name__", type(function).__name__)
        return DistributedDataset(start, self._transfer, options, name, _unknown)

    def _contexts(self, options: InputOptions) -> Sequence[InputContext]:
        total, first = self._fed.total, self._fed.first
        if options.experimental_replication_mode is InputReplicationMode.PER_WORKER:
            # A strategy of this process's devices has no part in what others read.
            index, count = jax.process_index(), jax.process_count()
            if self._fed.are_all:
                index, count = 0, 1
            return [InputContext(count, index, total)]
        own = range(first, first + self._fed.local)
        return [InputContext(total, replica, total) for replica in own]


def refuse_for_each_replica(options: InputOptions) -> None:
    """Raise if one dataset is to be a pipeline for each replica.

    Raises:
      ValueError: `options` say so.
    """
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise ValueError(
            "InputReplicationMode.PER_REPLICA is for input functions: use "
            "`strategy.distribute_datasets_from_function(fn, options)`. Here one "
            "dataset is divided over all replicas."
        )


def _length_of(source: Source) -> int | None:
    return source.length


def _unknown() -> None:
    return None
