"""Iterators and steps over them, as strategies of TensorFlow 1 have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from jaxstrategy.compat._input_iterator import InputIterator
from jaxstrategy.inputs._input_options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from jaxstrategy.inputs.sources._source import Dataset, Source
from jaxstrategy.strategies._strategy import Strategy
from jaxstrategy.text._shown import shown
from jaxstrategy.values._types import Function, PyTree

# A batch for one replica with too few rows is filled up, as everywhere; a last group of
# batches that is not full has no step.
OF_GROUPS = InputOptions(remainder="drop_empty")


class GetsNext(Protocol):
    """What steps read from: an `InputIterator`, or one of the core's."""

    def get_next(self) -> PyTree:
        """The next batch."""
        ...


def make_dataset_iterator(
    core: Strategy, dataset: Dataset, options: InputOptions | None = None
) -> InputIterator:
    """An iterator over global batches, which are divided over the replicas.

    Args:
      core: the strategy.
      dataset: as `experimental_distribute_dataset` takes it.
      options: how batches reach the replicas.

    Raises:
      TypeError: `dataset` is nothing that batches can be read from.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> iterator = make_dataset_iterator(strategy, js.batches(np.arange(4.0), 4))
    >>> experimental_run(strategy, lambda x: 10 * x, iterator).values
    (Array([ 0., 10.], dtype=float32), Array([20., 30.], dtype=float32))
    """
    return InputIterator(core.experimental_distribute_dataset(dataset, options))


def make_input_fn_iterator(
    core: Strategy,
    input_fn: Callable[[InputContext], Dataset],
    replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
) -> InputIterator:
    """An iterator over the elements of an input function, each for one replica.

    The function is called once, and not again by `initialize()`. Its elements go to the
    replicas in turn, undivided, scalars too. At the end, elements that are fewer than
    the replicas are left out.

    Args:
      core: the strategy.
      input_fn: returns a dataset, given an `InputContext`; or a function that returns
        the next element each time it is called, and raises `OutOfRangeError` when there
        is none.
      replication_mode: PER_WORKER.

    Raises:
      ValueError: `replication_mode` is another one.
      TypeError: `input_fn` is no function, or gives no dataset.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> iterator = make_input_fn_iterator(strategy, lambda context: range(5))
    >>> [element.values for element in iterator]  # doctest: +NORMALIZE_WHITESPACE
    [(Array(0, dtype=int32), Array(1, dtype=int32)),
     (Array(2, dtype=int32), Array(3, dtype=int32))]
    """
    if replication_mode is not InputReplicationMode.PER_WORKER:
        raise ValueError(
            f"Input replication mode not supported: {shown(replication_mode)}. Input "
            "functions of `make_input_fn_iterator` are called once for each worker, "
            "InputReplicationMode.PER_WORKER; for one pipeline per replica use "
            "`distribute_datasets_from_function` with `InputOptions`."
        )

    def dataset_fn(context: InputContext) -> Dataset:
        return _as_dataset(input_fn(context))

    if not callable(input_fn):
        dataset_fn = input_fn  # which the core refuses, by its type
    return InputIterator(core.distribute_datasets_from_function(dataset_fn, OF_GROUPS))


def experimental_run(
    core: Strategy, fn: Function, input_iterator: GetsNext | None = None
) -> PyTree:
    """`fn` of the next element, as one argument, on each replica.

    Args:
      core: the strategy.
      fn: takes an element, also if that is a tuple; without an iterator, nothing.
      input_iterator: is asked for one element.

    Returns:
      As of `run`.

    Raises:
      OutOfRangeError: there is no element.
    """
    args = (
        () if input_iterator is None else (require_iterator(input_iterator).get_next(),)
    )
    return core.run(fn, args)


def require_iterator(iterator: Any) -> GetsNext:
    """`iterator`, if it is one that elements can be asked of.

    Raises:
      TypeError: it is not.
    """
    if not callable(getattr(iterator, "get_next", None)):
        raise TypeError(
            f"{shown(iterator)} was given as the iterator, but has no `get_next`. Give "
            "what `make_dataset_iterator(dataset)` or `make_input_fn_iterator(fn)` of "
            "the strategy returns."
        )
    return iterator


def _as_dataset(given: Any) -> Dataset:
    """What an input function returned, as the core takes datasets."""
    is_dataset = isinstance(given, (Source, Iterable, type))
    if is_dataset or not callable(given) or inspect.isgeneratorfunction(given):
        return given
    next_element: Callable[[], PyTree] = given
    return lambda: _called(next_element)


def _called(next_element: Callable[[], PyTree]) -> Iterator[PyTree]:
    """The elements that a function returns one by one, or of the pass it returns."""
    try:
        first = next_element()
        if isinstance(first, Iterator):
            yield from first
            return
        yield first
        while True:
            yield next_element()
    except StopIteration:  # OutOfRangeError is one
        return
