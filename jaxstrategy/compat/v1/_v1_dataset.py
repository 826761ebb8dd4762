"""A dataset with the methods of TensorFlow 1: `DistributedDatasetV1`."""

from __future__ import annotations

from typing import final

from jaxstrategy.compat._makes_iterators import MakesIterators
from jaxstrategy.inputs._dataset import DistributedDataset


@final
class DistributedDatasetV1(MakesIterators, DistributedDataset):
    """What the methods of a strategy of `compat.v1` make of a dataset.

    Args:
      dataset: the same as a strategy of today has made it.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.experimental_distribute_dataset([np.arange(4)])
    >>> iterator = dataset.make_initializable_iterator()
    >>> iterator.initializer
    []
    >>> iterator.get_next().values
    (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        super().__init__(
            dataset._start,
            dataset._transfer,
            dataset._options,
            dataset._name,
            dataset._length,
        )

    def _read(self) -> DistributedDataset:
        return self
