"""What `distribute_dataset` of 2018 returns: `PerDeviceDataset`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, final

from jaxstrategy.compat._inputs import OF_GROUPS
from jaxstrategy.compat._makes_iterators import MakesIterators
from jaxstrategy.inputs._dataset import DistributedDataset
from jaxstrategy.inputs._input_options import InputContext
from jaxstrategy.inputs.sources._choose import as_source
from jaxstrategy.strategies._strategy import Strategy
from jaxstrategy.text._shown import shown
from jaxstrategy.values._types import PyTree


@final
class PerDeviceDataset(MakesIterators):
    """Elements for all towers: each is for one tower, in turn.

    Made by `distribute_dataset` of a `DistributionStrategy`. Elements are not divided.
    At the end, elements that are fewer than the towers are left out.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.distribute_dataset(lambda: range(5))
    >>> [[int(x) for x in element.values] for element in dataset]
    [[0, 1], [2, 3]]
    >>> iterator = dataset.make_initializable_iterator()
    >>> iterator.initializer
    []
    >>> iterator.get_next().values
    (Array(0, dtype=int32), Array(1, dtype=int32))
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    def _read(self) -> DistributedDataset:
        return self._dataset

    def __iter__(self) -> Iterator[PyTree]:
        return self.make_one_shot_iterator()

    def __repr__(self) -> str:
        return f"PerDeviceDataset({self._dataset!r})"


def per_device_dataset(
    core: Strategy, dataset_fn: Callable[[], Any], reads_ahead: bool = True
) -> PerDeviceDataset:
    """The elements of what `dataset_fn` returns, for the towers in turn.

    Args:
      core: the strategy.
      dataset_fn: is called once, without arguments, and returns a dataset.
      reads_ahead: whether elements are prepared ahead of the step.

    Raises:
      TypeError: `dataset_fn` is no function.
      ValueError: it returns no dataset.
    """
    if not callable(dataset_fn):
        raise TypeError(
            f"`distribute_dataset` was given {shown(dataset_fn)}; a function without "
            "arguments was wanted that returns the dataset: `lambda: dataset`."
        )

    def elements(_: InputContext) -> Any:
        return _checked(dataset_fn())

    elements.__name__ = getattr(dataset_fn, "__name__", type(dataset_fn).__name__)
    options = OF_GROUPS
    if not reads_ahead:
        options = dataclasses.replace(options, experimental_per_replica_buffer_size=0)
    return PerDeviceDataset(core.distribute_datasets_from_function(elements, options))


def _checked(dataset: Any) -> Any:
    """What `dataset_fn` has returned, if it is a dataset.

    Raises:
      ValueError: it is not.
    """
    try:
        as_source(dataset)
    except TypeError as error:
        raise ValueError(
            "dataset_fn() must return a tf.data.Dataset when using a "
            f"DistributionStrategy, or another dataset. {error}"
        ) from None
    return dataset
