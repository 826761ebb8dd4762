"""Datasets as a strategy's user divides them: `DividesData`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxstrategy._src.contexts import context
from jaxstrategy._src.inputs.dataset import DistributedDataset, Feeding
from jaxstrategy._src.inputs.input_options import (
    InputContext,
    InputOptions,
    checked_input_options,
)
from jaxstrategy._src.strategies.composition import ComposedStrategy
from jaxstrategy._src.strategies.feeding import feeding_for


class DividesData(ComposedStrategy):
    """The methods of a strategy that divide datasets."""

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """`dataset`, each of its global batches divided over the replicas.

        Replica i has the i-th part of the rows, in order. A batch that the replicas
        cannot share equally is filled up with copies of its last row; inside the step
        `masked_mean`, `masked_sum` and `batch_mask` know which rows are real. Some
        batches are read and copied to the devices ahead, in a thread.

        Args:
          dataset: where batches come from: `jaxstrategy.batches` of arrays in memory; a
            list of batches, a function that makes generators, or another iterable; a
            Grain dataset or loader, a PyTorch `DataLoader`, a `tf.data.Dataset`, a
            Hugging Face dataset in NumPy form. A batch is a pytree of arrays of shape
            `[rows, ...]`. A list of bare arrays is a list of batches, alike but for
            their rows; one batch of several arrays is a tuple of them, `[(x, y)]`. With
            several processes each reads the same batches and uses its own rows.
          options: see `InputOptions`.

        Returns:
          An iterable of the same pytrees with `PerReplica`s; with one replica of plain
          arrays, which are not filled up.

        Raises:
          TypeError: `dataset` is nothing that batches can be read from.
          ValueError: `options` ask for an input pipeline for each replica.
          ContextError: inside `run`.

        What is wrong with a batch (a scalar, text, other rows in one array than in
        another, another structure than the first) is said when the batch is reached,
        with its number and the array's path; the batches before it are given.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> for batch in strategy.experimental_distribute_dataset([np.arange(4)]):
        ...     print(batch.values)
        (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
        """
        context.require_host(self, "experimental_distribute_dataset")
        return self._feeding.of_dataset(dataset, checked_input_options(options))

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """The batches of what `dataset_fn` makes, each for one replica.

        For sources of which each process should read its own part: it is told which.

        Args:
          dataset_fn: given an `InputContext`, returns where batches come from, as
            `experimental_distribute_dataset` takes it. It is called once in each
            process, and a step takes as many batches as the process has replicas; with
            `InputReplicationMode.PER_REPLICA`, once for each replica.
          options: see `InputOptions`.

        Returns:
          An iterable of pytrees with `PerReplica`s, with one replica of plain arrays.
          It goes on until no replica has a batch left; those that have none before get
          one without real rows. The batches of the first step may have any sizes;
          later ones are not larger. Scalars are each replica's own.

        Raises:
          TypeError: `dataset_fn` cannot be called, or returns nothing that batches can
            be read from.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> def dataset_fn(context):
        ...     rows = context.get_per_replica_batch_size(4)
        ...     return js.batches(np.arange(8), rows)
        >>> for batch in strategy.distribute_datasets_from_function(dataset_fn):
        ...     print(batch.values)
        (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
        (Array([4, 5], dtype=int32), Array([6, 7], dtype=int32))
        """
        context.require_host(self, "distribute_datasets_from_function")
        require_function(dataset_fn)
        return self._feeding.of_function(dataset_fn, checked_input_options(options))

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """The name that `distribute_datasets_from_function` had in TensorFlow 2.0.

        Raises:
          TypeError: `dataset_fn` cannot be called, or returns nothing that batches can
            be read from.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> make = strategy.experimental_distribute_datasets_from_function
        >>> [batch.values for batch in make(lambda context: [np.arange(2)] * 2)]
        [(Array([0, 1], dtype=int32), Array([0, 1], dtype=int32))]
        """
        return self.distribute_datasets_from_function(dataset_fn, options)

    @property
    def _feeding(self) -> Feeding:
        return feeding_for(self._replicas, self._choices.processes)


def require_function(dataset_fn: object) -> None:
    """Raise unless it can be called.

    Raises:
      TypeError: it cannot.
    """
    if not callable(dataset_fn):
        raise TypeError(
            f"`dataset_fn` is {dataset_fn!r}, which cannot be called. A function of an "
            "`InputContext` was wanted; a dataset itself is for "
            "`experimental_distribute_dataset`."
        )
