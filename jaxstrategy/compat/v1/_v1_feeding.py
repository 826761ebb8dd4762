"""The inputs of a strategy of TensorFlow 1: `FeedsReplicas`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxstrategy.compat import _inputs
from jaxstrategy.compat._input_iterator import InputIterator
from jaxstrategy.compat._numpy_dataset import NumpyDataset, numpy_dataset
from jaxstrategy.inputs._input_options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from jaxstrategy.strategies._strategy import Strategy
from jaxstrategy.values._types import Function, PyTree


class FeedsReplicas:
    """The methods of a strategy that make iterators, and take steps with them."""

    _core: Strategy

    def make_dataset_iterator(
        self, dataset: Any, options: InputOptions | None = None
    ) -> InputIterator:
        """An iterator over global batches, which are divided over the replicas.

        Args:
          dataset: batches of the global size, as `experimental_distribute_dataset`
            takes them.
          options: how they reach the replicas. By default a batch that cannot be shared
            equally is filled up, and `masked_mean` knows it; with
            `InputOptions(remainder="error")` it is an error.

        Raises:
          TypeError: `dataset` is nothing that batches can be read from.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import v1
        >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
        >>> iterator = strategy.make_dataset_iterator(js.batches(np.arange(8), 4))
        >>> strategy.experimental_run(lambda x: 10 * x, iterator).values
        (Array([ 0, 10], dtype=int32), Array([20, 30], dtype=int32))
        >>> iterator.initialize()  # begins again
        []
        """
        return _inputs.make_dataset_iterator(self._core, dataset, options)

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """An iterator over the elements of an input function, each for one replica.

        The function is called once, and not again by `initialize()`. Its elements go to
        the replicas in turn, undivided, scalars too. At the end, elements that are
        fewer than the replicas are left out.

        Args:
          input_fn: returns a dataset, given an `InputContext`; or a function that
            returns the next element each time, and raises `OutOfRangeError` at the end.
          replication_mode: PER_WORKER.

        Raises:
          ValueError: `replication_mode` is another one.
          TypeError: `input_fn` is no function, or gives no dataset.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import v1
        >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
        >>> def input_fn(context):
        ...     n, i = context.num_input_pipelines, context.input_pipeline_id
        ...     rows = strategy.experimental_make_numpy_dataset(np.arange(5))
        ...     return rows.shard(n, i)
        >>> iterator = strategy.make_input_fn_iterator(input_fn)
        >>> [[int(x) for x in element.values] for element in iterator]
        [[0, 1], [2, 3]]
        """
        return _inputs.make_input_fn_iterator(self._core, input_fn, replication_mode)

    def experimental_run(
        self, fn: Function, input_iterator: _inputs.GetsNext | None = None
    ) -> PyTree:
        """Runs `fn` on each replica with the next element, as one argument.

        Args:
          fn: a step that takes an element, also if that is a tuple; without an
            iterator, nothing.
          input_iterator: what `make_dataset_iterator` or `make_input_fn_iterator`
            returned; it is asked for one element.

        Returns:
          As of `run`.

        Raises:
          OutOfRangeError: there is no element.
          TypeError: `input_iterator` is no iterator.
        """
        return _inputs.experimental_run(self._core, fn, input_iterator)

    def experimental_make_numpy_dataset(
        self, numpy_input: PyTree, session: object = None
    ) -> NumpyDataset:
        """The rows of arrays as a dataset.

        Args:
          numpy_input: arrays with equally many rows, in tuples and dicts. A list is one
            array, of what is stacked.
          session: of a graph, in TensorFlow; nothing here.

        Returns:
          A dataset of rows, with `batch`, `repeat`, `shard` and `shuffle`.

        Raises:
          ValueError: there are no arrays, or they differ in their rows.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import v1
        >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
        >>> rows = strategy.experimental_make_numpy_dataset((np.arange(4), np.ones(4)))
        >>> iterator = strategy.make_dataset_iterator(rows.batch(4))
        >>> x, y = iterator.get_next()
        >>> x.values
        (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
        """
        return numpy_dataset(numpy_input)
