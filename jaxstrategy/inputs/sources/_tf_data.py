"""`tf.data`: whatever has its iterator protocol. TensorFlow is not imported."""

from __future__ import annotations

import zlib
from typing import Any, final

import jax
import numpy as np

from jaxstrategy import _source
from jaxstrategy._values import PyTree
from jaxstrategy.inputs.sources._counted import CountedPass
from jaxstrategy.inputs.sources._source import Pass, Source, State

_NAME = "the tf.data dataset"
_BYTES = 4096  # of each array that are compared


def is_tf_data(dataset: Any) -> bool:
    """Whether `dataset` has the methods of a `tf.data.Dataset` that are needed."""
    wanted = ("as_numpy_iterator", "element_spec", "cardinality")
    return all(hasattr(dataset, name) for name in wanted)


@final
class TfDataSource(Source):
    """A `tf.data.Dataset` of batches, read as NumPy arrays."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def start(self) -> Pass:
        return _TfDataPass(self._dataset)

    @property
    def length(self) -> int | None:
        count = int(self._dataset.cardinality())
        return count if count >= 0 else None  # -1: without end, -2: unknown

    @property
    def name(self) -> str:
        return _NAME


@final
class _TfDataPass(Pass):
    def __init__(self, dataset: Any) -> None:
        self._batches = CountedPass(lambda: iter(dataset.as_numpy_iterator()), _NAME)
        self._last: PyTree = None

    def __next__(self) -> PyTree:
        self._last = next(self._batches)
        return self._last

    def get_state(self) -> State:
        return {**self._batches.get_state(), "last": _digest(self._last)}

    def set_state(self, state: State) -> PyTree | None:
        self._last = self._batches.set_state(state)
        if state.get("last") != _digest(self._last):
            _source.warn(
                f"Batch {state['batches']} of {_NAME} is not what it was when the "
                "state was saved: the dataset changed, or shuffles or augments anew in "
                "each pass. If it shuffles, training goes on with other examples than "
                "those that were left. Give `shuffle` a `seed` and "
                "`reshuffle_each_iteration=False`, or use `js.batches(shuffle=seed)` "
                "or Grain, which resume exactly.",
                UserWarning,
            )
        return self._last

    def close(self) -> None:
        self._batches.close()
        self._last = None


def _digest(batch: PyTree) -> int:
    """A number that tells one batch from another by the beginning of its arrays."""
    digest = 0
    for leaf in jax.tree.leaves(batch):
        array = np.asarray(leaf)
        if array.dtype.hasobject:  # text
            start = repr(array.ravel()[:16].tolist()).encode()
        else:
            start = array.ravel()[: _BYTES // array.itemsize + 1].tobytes()
        digest = zlib.crc32(start, digest)
    return digest
