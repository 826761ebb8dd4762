"""How a worker reads its datasets: `WorkerDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import numpy as np

from jaxstrategy.inputs._ahead import Ahead
from jaxstrategy.inputs._dataset import DistributedDataset
from jaxstrategy.inputs._deferred_dataset import DeferredDataset
from jaxstrategy.inputs._iterator import DistributedIterator
from jaxstrategy.inputs.sources._choose import as_source
from jaxstrategy.inputs.sources._source import Dataset, Pass, Source, State
from jaxstrategy.parameter_servers import _worker_surroundings
from jaxstrategy.parameter_servers._peeked_iterator import Positioned
from jaxstrategy.values._types import PyTree

_AHEAD = 2


class NoElements(ValueError):
    """A dataset is empty of which an element is needed."""


@final
class WorkerDataset:
    """The dataset of one worker, read from the beginning as often as asked for.

    Args:
      make: returns it; called again if it can be read only once.

    Attributes:
      only_once: the last that it returned, if it was such a one.

    Raises:
      UnexpectedDataset: what it returns is nothing that elements can be read from.
      Exception: what it raises.
    """

    def __init__(self, make: Callable[[], Dataset]) -> None:
        self._make = make
        self.only_once: Iterator[Any] | None = None
        self._read: Source | DistributedDataset | None = self._made()

    def read(self) -> ReadElements:
        """The elements, from the first one on, some of them read ahead in a thread."""
        return ReadElements(self._started(), tells_position=False)

    def read_on(self, position: State | None) -> ReadElements:
        """The same with positions, from one of them on."""
        started = self._started()
        if position is not None:
            started.set_state(position)
        return ReadElements(started, tells_position=True)

    def first(self) -> PyTree:
        """The first element; nothing is read ahead, and what was begun is ended.

        Raises:
          NoElements: there is none.
        """
        started = self._started()
        try:
            return _next(started)
        except StopIteration:
            raise NoElements(
                "The per-worker dataset has no elements, so that it is not known what "
                "functions would be given. Let it have at least one, on the "
                "coordinator, too."
            ) from None
        finally:
            started.close()

    def check_resumable(self) -> None:
        """Raise if reading cannot go on elsewhere.

        Raises:
          TypeError: the message says why.
        """
        started = self._started()
        try:
            started.get_state()
        finally:
            started.close()

    def _started(self) -> Pass | DistributedIterator:
        source = self._made() if self._read is None else self._read
        # What can be read only once is made again for the next.
        self._read = source if self.only_once is None else None
        return (
            iter(source) if isinstance(source, DistributedDataset) else source.start()
        )

    def _made(self) -> Source | DistributedDataset:
        made = self._make()
        self.only_once = only_once(made)
        if isinstance(made, DeferredDataset):
            surroundings = _worker_surroundings.current()
            assert surroundings is not None, "a worker builds it"
            return made.placed(surroundings.replicas)
        if isinstance(made, DistributedDataset):
            raise UnexpectedDataset(
                "Unexpected dataset type! It was distributed by another strategy, over "
                "devices that are not the worker's. Distribute it with the "
                "ParameterServerStrategy, or give it as it is."
            )
        return _source(made)


@final
class ReadElements(Iterator[PyTree]):
    """Elements, some of them read ahead.

    Args:
      started: what they are read from.
      tells_position: whether they come as `Positioned`.

    Attributes:
      tells_position: as given.
    """

    def __init__(
        self, started: Pass | DistributedIterator, tells_position: bool
    ) -> None:
        self.tells_position = tells_position
        self._started = started
        read = _positioned if tells_position else _next
        # The other kind reads ahead by itself.
        ahead = 0 if isinstance(started, DistributedIterator) else _AHEAD
        self._ahead = Ahead(lambda: read(started), ahead) if ahead else None
        self._read = read

    def __next__(self) -> PyTree:
        if self._ahead is None:
            return self._read(self._started)
        return next(self._ahead)

    def close(self) -> None:
        """Stop reading."""
        # What another thread still reads from cannot be closed.
        if self._ahead is None or self._ahead.close():
            self._started.close()


class UnexpectedDataset(TypeError, ValueError):
    """Something was given as a dataset, or returned as one, that is none."""


def only_once(dataset: Dataset) -> Iterator[Any] | None:
    """The iterator that a dataset is, or is made of; None if it begins anew."""
    if isinstance(dataset, DeferredDataset):
        return dataset.only_once
    return dataset if isinstance(dataset, Iterator) else None


def _source(dataset: Dataset) -> Source:
    try:
        return as_source(dataset)
    except TypeError as error:
        raise UnexpectedDataset(f"Unexpected dataset type! {error}") from None


def _next(started: Pass | DistributedIterator) -> PyTree:
    element = next(started)
    # The source may overwrite its arrays when it is asked for the next one.
    if isinstance(started, DistributedIterator) or started.are_own:
        return element
    return jax.tree.map(_own, element)


def _own(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _positioned(started: Pass | DistributedIterator) -> Positioned:
    element = _next(started)
    return Positioned(element, started.get_state())
