"""Hugging Face `datasets`: `Dataset` and `IterableDataset`, in NumPy form, batched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import final

import numpy as np

from jaxstrategy.inputs.sources import _counted
from jaxstrategy.inputs.sources._counted import SnapshotPass
from jaxstrategy.inputs.sources._reading_order import ReadingOrder
from jaxstrategy.inputs.sources._source import Dataset, Pass, Source, State
from jaxstrategy.values._types import PyTree

_ADVICE = 'Give `dataset.with_format("numpy").batch(batch_size)`.'


@final
class TableSource(Source):
    """A `datasets.Dataset`, each of whose rows is a batch."""

    def __init__(self, dataset: Dataset) -> None:
        form = dataset.format["type"]
        if form != "numpy":
            raise TypeError(
                f"The Hugging Face dataset is in the form {form!r} and not in that of "
                f"NumPy. {_ADVICE}"
            )
        self._dataset = dataset

    def start(self) -> Pass:
        return _TablePass(self._dataset, self.name)

    @property
    def length(self) -> int | None:
        return len(self._dataset)

    @property
    def name(self) -> str:
        return "the Hugging Face Dataset"


@final
class _TablePass(Pass):
    def __init__(self, dataset: Dataset, name: str) -> None:
        self._dataset = dataset
        self._name = name
        self._batches = 0

    def __next__(self) -> PyTree:
        if self._batches >= len(self._dataset):
            raise StopIteration
        batch = self._dataset[self._batches]
        _check(batch)
        self._batches += 1
        return batch

    def get_state(self) -> State:
        return {"batches": self._batches, "length": len(self._dataset)}

    def set_state(self, state: State) -> PyTree | None:
        wanted = _counted.counted(state, "batches", self._name)
        if wanted > len(self._dataset):
            raise _counted.too_few(self._name, len(self._dataset), wanted)
        _counted.check_length(state, len(self._dataset), self._name)
        self._batches = wanted
        return self._dataset[wanted - 1] if wanted else None


@final
class StreamSource(Source):
    """A `datasets.IterableDataset` of batches, resumed by its own state."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._order = ReadingOrder()

    def start(self) -> Pass:
        return _StreamPass(self._dataset, self._order, self.name)

    @property
    def name(self) -> str:
        return "the Hugging Face IterableDataset"


@final
class _StreamPass(SnapshotPass):
    def __init__(self, dataset: Dataset, order: ReadingOrder, name: str) -> None:
        self._dataset = dataset
        self._order = order
        self.name = name
        self._view: Dataset = None
        self._batches: Iterator[PyTree] | None = None

    def _begin(self, epoch: int, state: State = None) -> Iterator[PyTree]:
        self.close()
        self._order.begin(self)
        # A dataset of its own, because a state that is loaded stays for good.
        self._view = self._dataset.with_format("numpy")
        self._view.set_epoch(epoch)
        if state is not None:
            self._view.load_state_dict(state)
        self._batches = iter(self._view)
        return self._batches

    def _begun(self) -> Iterator[PyTree]:
        return self._batches or self._begin(self._dataset.epoch)

    def _read(self) -> PyTree:
        batches = self._begun()
        self._order.take(self)
        batch = next(batches)
        _check(batch)
        return batch

    def _check_place(self) -> None:
        self._check_buffer()
        self._begun()
        self._order.check(self, self.name)

    def _take(self) -> dict[str, State]:
        state = self._view.state_dict()
        # Through text: a copy of numbers, text, lists and dicts.
        return {"stream": json.loads(json.dumps(state))}

    def _load(self, state: State) -> None:
        self._check_buffer()
        match state:
            case {"stream": {"examples_iterable": dict(), "epoch": int(epoch)}}:
                self._begin(epoch, state["stream"])
            case _:
                raise _counted.foreign(self.name, state, "its `state_dict`")

    def _check_buffer(self) -> None:
        if _shuffles(getattr(self._dataset, "_ex_iterable", None)):
            raise TypeError(
                f"A pass over {self.name} cannot resume: it shuffles through a "
                "buffer, whose contents are not in its state, so examples would be "
                "left out. Shuffle before batching with `Dataset.shuffle(seed=...)` of "
                "a dataset that is not streamed, or use Grain or "
                "`js.batches(arrays, batch_size, shuffle=seed)`."
            )

    def close(self) -> None:
        batches, self._batches, self._view = self._batches, None, None
        _counted.close(batches)


def _shuffles(examples: Dataset) -> bool:
    """Whether there is a shuffle buffer among the steps that lead to `examples`."""
    if examples is None:
        return False
    inner = [getattr(examples, "ex_iterable", None)]
    inner += getattr(examples, "ex_iterables", [])
    return "BufferShuffled" in type(examples).__name__ or any(map(_shuffles, inner))


def _check(batch: PyTree) -> None:
    """Raise if `batch` is a single example: a dict with a number or a text in it."""
    for column, value in batch.items():
        if not isinstance(value, (np.ndarray, dict)):
            raise TypeError(
                f"`batch[{column!r}]` of the Hugging Face dataset is {value!r:.100}: "
                f"one example and not a batch of them. {_ADVICE}"
            )
