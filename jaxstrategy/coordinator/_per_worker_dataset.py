"""A dataset that each worker reads by itself: `PerWorkerDataset`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, final

import jax

from jaxstrategy._errors import ContextError
from jaxstrategy.coordinator._per_worker_builders import (
    DatasetBuilder,
    IteratorBuilder,
)
from jaxstrategy.coordinator._per_worker_reading import (
    UnexpectedDataset,
    WorkerDataset,
)
from jaxstrategy.coordinator._per_worker_value import PerWorkerValue
from jaxstrategy.inputs.sources._source import State
from jaxstrategy.parameter_servers._element_leaves import leaves_of, structure_of
from jaxstrategy.parameter_servers._worker_resource import WorkerResource
from jaxstrategy.parameter_servers._worker_surroundings import WorkerSurroundings
from jaxstrategy.scheduled import _recorder
from jaxstrategy.scheduled._worker_argument import Element, IteratorArgument
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import PyTree


@final
class PerWorkerDataset:
    """A dataset of which each worker reads all elements, unless it is told otherwise.

    Made by `ClusterCoordinator.create_per_worker_dataset`. `iter(dataset)` is an
    iterator on each worker, which scheduled functions take as an argument.

    Args:
      given: a function that makes a dataset, or one itself.
      surroundings: of the coordinator, which calls the function, too.
      workers: how many there are.
      resume: whether a worker that was started again goes on where it was.

    Raises:
      UnexpectedDataset: it is, or returns, no dataset.
      TypeError: it cannot be read more than once, or not be resumed.
      Exception: what the function raises.
    """

    def __init__(
        self,
        given: Any,
        surroundings: WorkerSurroundings,
        workers: int,
        resume: bool = False,
    ) -> None:
        builder = DatasetBuilder(given if _is_function(given) else lambda: given)
        self._surroundings = surroundings
        self._workers = workers
        self._resume = resume
        with surroundings.entered():
            # Its errors are the caller's, and need no worker to be seen.
            self._here: WorkerDataset | None = builder(0)
            if resume:
                self._here.check_resumable()
        builder.made = self._here.only_once
        if builder.made is not None and not _is_function(given):
            raise UnexpectedDataset(
                f"Unexpected dataset type! The {type(given).__name__} can be read only "
                "once, but each worker reads all of it. Give a function that makes "
                "one: `lambda: read()` instead of `read()`."
            )
        self._one_reader = threading.Lock()
        self._element: Element | None = None
        self._spec: PyTree = None
        self._resource = WorkerResource(builder)

    def __iter__(self) -> PerWorkerIterator:
        """A new iterator on each worker, which begins with the first element."""
        if _recorder.current() is not None:
            raise ContextError(
                "A scheduled function called `iter` of a per-worker dataset, which "
                "would begin anew in each call. Call it outside, and pass the iterator "
                "to the function."
            )
        return PerWorkerIterator(self, self._resource, self._workers, self._resume)

    @property
    def element_spec(self) -> PyTree:
        """The type of an element of one worker: `jax.ShapeDtypeStruct`s for arrays.

        The first one is read on the coordinator, once, to know it.

        Raises:
          ValueError: there is none.
        """
        self._learn()
        return self._spec

    @property
    def element(self) -> Element:
        """What each element is like.

        Raises:
          ValueError: there is none.
        """
        self._learn()
        assert self._element is not None
        return self._element

    def _learn(self) -> None:
        with self._one_reader:
            if self._here is not None:
                self._read(self._here)
                self._here = None

    def _read(self, here: WorkerDataset) -> None:
        with self._surroundings.entered():
            first = here.first()
        leaves, of_type = leaves_of(first)
        whole = [x for x, mask in zip(leaves, of_type.masks, strict=True) if not mask]
        structure = structure_of(first)
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in whole]
        split = [s for s, m in zip(of_type.split, of_type.masks, strict=True) if not m]
        self._spec = jax.tree.unflatten(
            structure,
            [PerReplica(x) if s else x for x, s in zip(types, split, strict=True)],
        )
        self._element = Element(of_type, structure)


@final
class PerWorkerIterator(PerWorkerValue, IteratorArgument, Iterator[Any]):
    """An iterator on each worker. Made by `iter` of a `PerWorkerDataset`.

    A scheduled function takes it as an argument, and elements of it by `next`,
    `get_next` or `get_next_as_optional`: those of the worker that runs the function.

    Args:
      dataset: what it goes through.
      source: the dataset on each worker.
      workers: how many there are.
      resume: whether a worker that was started again goes on where it was.
    """

    def __init__(
        self,
        dataset: PerWorkerDataset,
        source: WorkerResource,
        workers: int,
        resume: bool,
    ) -> None:
        self._dataset = dataset
        self._workers = workers
        self._positions: dict[int, State] | None = {} if resume else None
        self._resource = WorkerResource(IteratorBuilder(self._positions), (source,))

    @property
    def element(self) -> Element:
        """What each element is like."""
        return self._dataset.element

    @property
    def element_spec(self) -> PyTree:
        """The type of an element of one worker."""
        return self._dataset.element_spec

    @property
    def resource(self) -> WorkerResource:
        """The iterators."""
        return self._resource

    @property
    def tells_position(self) -> bool:
        """Whether workers say where it is after each call."""
        return self._positions is not None

    def keep_position(self, worker: int, position: State) -> None:
        """A worker's iterator is there now, and what it gave before is used."""
        assert self._positions is not None
        self._positions[worker] = position

    @property
    def values(self) -> NoReturn:
        """None: the iterators are on the workers.

        Raises:
          NotImplementedError: always.
        """
        raise _not_here("values")

    def __next__(self) -> NoReturn:
        raise _not_here("next")

    def get_next(self) -> NoReturn:
        """None, on the coordinator.

        Raises:
          NotImplementedError: always.
        """
        raise _not_here("get_next")

    def get_next_as_optional(self) -> NoReturn:
        """None, on the coordinator.

        Raises:
          NotImplementedError: always.
        """
        raise _not_here("get_next_as_optional")

    def __len__(self) -> int:
        return self._workers

    def __repr__(self) -> str:
        return f"<PerWorkerIterator on {self._workers} workers>"


def _is_function(given: Any) -> bool:
    return callable(given) and not isinstance(given, type | Iterable)


def _not_here(method: str) -> NotImplementedError:
    return NotImplementedError(
        f"`{method}` of a per-worker iterator was called on the coordinator, but its "
        "elements are on the workers. Pass it to a scheduled function, and call "
        "`next(iterator)` there."
    )
