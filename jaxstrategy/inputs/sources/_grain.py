"""Grain: `MapDataset`, `IterDataset` and `DataLoader`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, final

from jaxstrategy.inputs.sources import _counted
from jaxstrategy.inputs.sources._counted import SnapshotPass
from jaxstrategy.inputs.sources._source import Dataset, Pass, Source, State
from jaxstrategy.values._types import PyTree

# Elements are whole batches here: Grain's 500 read ahead would fill the memory.
_THREADS = 16
_AHEAD = 32


@final
class GrainSource(Source):
    """A Grain dataset or loader of batches, resumed by Grain's own state."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._length = _length(dataset)

    def start(self) -> Pass:
        dataset = self._dataset
        if hasattr(dataset, "to_iter_dataset"):
            options = sys.modules["grain"].ReadOptions(
                num_threads=_THREADS, prefetch_buffer_size=_AHEAD
            )
            dataset = dataset.to_iter_dataset(options)
        return _GrainPass(dataset, self.name, self._length)

    @property
    def length(self) -> int | None:
        return self._length

    @property
    def name(self) -> str:
        return f"the Grain {_kind(self._dataset)}"


@final
class _GrainPass(SnapshotPass):
    def __init__(self, dataset: Dataset, name: str, length: int | None) -> None:
        self._dataset = dataset
        self.name = name
        self._length = length
        self._iterator: Any = None  # begun when first needed; it starts threads

    def _begun(self) -> Any:
        if self._iterator is None:
            self._iterator = _told(lambda: iter(self._dataset))
        return self._iterator

    def _read(self) -> PyTree:
        return _told(lambda: next(self._begun()))

    def _check_place(self) -> None:
        """All can."""

    def _take(self) -> dict[str, State]:
        state = self._begun().get_state()
        if isinstance(state, bytes):  # of a DataLoader: JSON already
            return {"data_loader": state.decode()}
        try:
            # Through text: a copy, which Grain does not change as it goes on.
            own = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"The state of {self.name} cannot be written as JSON ({error}), so it "
                "cannot be resumed. Let the `get_state` of its own iterators return "
                "numbers, text, lists and dicts."
            ) from error
        return {"dataset": own, **_counted.of_length(self._length)}

    def _load(self, state: State) -> None:
        match state:
            case {"data_loader": str(text)}:
                own: Any = text.encode()
            case {"dataset": own}:
                pass
            case _:
                raise _counted.foreign(self.name, state, "Grain's state")
        _counted.check_length(state, self._length, self.name)
        self.close()
        try:
            self._begun().set_state(own)
        except (KeyError, TypeError, ValueError) as error:
            wanted = f"a state that Grain takes (it said: {error})"
            raise _counted.foreign(self.name, state, wanted) from error

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        _counted.close(iterator)  # a DataLoader's ends when it is let go


def _told(read: Callable[[], Any]) -> Any:
    """What `read` returns; Grain's error about flags says what to do."""
    try:
        return read()
    except Exception as error:
        if type(error).__name__ == "UnparsedFlagAccessError":
            error.add_note(
                "Grain's worker processes want absl's flags: call "
                "`absl.flags.FLAGS.mark_as_parsed()` before the first batch."
            )
        raise


def _kind(dataset: Dataset) -> str:
    for kind in ("MapDataset", "IterDataset"):
        if any(base.__name__ == kind for base in type(dataset).__mro__):
            return kind
    return type(dataset).__name__


def _length(dataset: Dataset) -> int | None:
    """The number of batches of a `MapDataset`, if it is known without reading."""
    if not hasattr(dataset, "to_iter_dataset") or _may_discard(dataset):
        return None
    length = len(dataset)
    return None if length == sys.maxsize else length  # repeated without end


def _may_discard(dataset: Dataset) -> bool:
    """Whether elements may be left out, which `len` counts all the same."""
    return "Filter" in type(dataset).__name__ or any(
        _may_discard(parent) for parent in getattr(dataset, "parents", ())
    )
