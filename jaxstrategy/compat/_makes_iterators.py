"""The ways in which older programs begin to read a dataset: `MakesIterators`."""

from __future__ import annotations

import abc

from jaxstrategy.compat._input_iterator import InputIterator
from jaxstrategy.inputs._dataset import DistributedDataset


class MakesIterators(abc.ABC):
    """Iterators of a dataset, by the names that it had before it was iterable."""

    @abc.abstractmethod
    def _read(self) -> DistributedDataset:
        """The dataset."""

    def make_one_shot_iterator(self) -> InputIterator:
        """An iterator over the elements, from the first on.

        Raises:
          TypeError: its first `get_next` does, if the data can be read only once, and
            were.
        """
        return InputIterator(self._read())

    def make_initializable_iterator(
        self, shared_name: str | None = None
    ) -> InputIterator:
        """An iterator that begins again whenever its `initializer` is asked for.

        The first pass begins by itself.

        Args:
          shared_name: of a graph's iterator, in TensorFlow; nothing here.
        """
        return InputIterator(self._read())
