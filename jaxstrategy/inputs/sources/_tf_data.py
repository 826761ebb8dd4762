"""`tf.data`: whatever has its iterator protocol. TensorFlow is not imported."""

from __future__ import annotations

from typing import final

from jaxstrategy.inputs.sources._counted import CountedPass
from jaxstrategy.inputs.sources._source import Dataset, Pass, Source


def is_tf_data(dataset: Dataset) -> bool:
    """Whether `dataset` has the methods of a `tf.data.Dataset` that are needed."""
    wanted = ("as_numpy_iterator", "element_spec", "cardinality")
    return all(hasattr(dataset, name) for name in wanted)


@final
class TfDataSource(Source):
    """A `tf.data.Dataset` of batches, read as NumPy arrays.

    It is resumed by reading again, so its shuffling needs a `seed`, and
    `reshuffle_each_iteration=False` if there is more than one pass.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def start(self) -> Pass:
        return CountedPass(
            lambda: iter(self._dataset.as_numpy_iterator()), self.name, self.length
        )

    @property
    def length(self) -> int | None:
        count = int(self._dataset.cardinality())
        return count if count >= 0 else None  # -1: without end, -2: unknown

    @property
    def name(self) -> str:
        return "the tf.data dataset"
