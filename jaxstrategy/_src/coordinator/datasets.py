"""Datasets that each worker reads by itself, and its index."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, final

import jax
import numpy as np

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.coordinator.values import PerWorkerValue
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.inputs.dataset import DeferredDataset, DistributedDataset
from jaxstrategy._src.inputs.input_options import InputContext
from jaxstrategy._src.inputs.iterator import DistributedIterator, Prefetcher
from jaxstrategy._src.inputs.library_sources import as_source
from jaxstrategy._src.inputs.sources import Dataset, Source, SourceIterator, State
from jaxstrategy._src.parameter_servers import worker as _worker
from jaxstrategy._src.parameter_servers.wire import peer
from jaxstrategy._src.parameter_servers.worker import (
    Positioned,
    WorkerContext,
    WorkerResource,
    leaves_of,
    structure_of,
)
from jaxstrategy._src.scheduled import trace as _recorder
from jaxstrategy._src.scheduled.trace import Element, IteratorArgument
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.values.per_replica import PerReplica

_AHEAD = 2


class NoElements(ValueError):
    """A dataset is empty of which an element is needed."""


@final
class WorkerDataset:
    """The dataset of one worker, read from the beginning as often as asked for."""

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
        """The first element; nothing is read ahead, and what was begun is ended."""
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
        """Raise if reading cannot go on elsewhere."""
        started = self._started()
        try:
            started.get_state()
        finally:
            started.close()

    def _started(self) -> SourceIterator | DistributedIterator:
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
            surroundings = _worker.current()
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
    """Elements, some of them read ahead."""

    def __init__(
        self, started: SourceIterator | DistributedIterator, tells_position: bool
    ) -> None:
        self.tells_position = tells_position
        self._started = started
        read = _positioned if tells_position else _next
        # The other kind reads ahead by itself.
        ahead = 0 if isinstance(started, DistributedIterator) else _AHEAD
        self._ahead = Prefetcher(lambda: read(started), ahead) if ahead else None
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


def _next(started: SourceIterator | DistributedIterator) -> PyTree:
    element = next(started)
    # The source may overwrite its arrays when it is asked for the next one.
    if isinstance(started, DistributedIterator) or started.are_own:
        return element
    return jax.tree.map(_own, element)


def _own(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _positioned(started: SourceIterator | DistributedIterator) -> Positioned:
    element = _next(started)
    return Positioned(element, started.get_state())


@final
class DatasetBuilder:
    """Calls the user's function on a worker."""

    def __init__(self, make: Callable[..., Dataset]) -> None:
        self._make: Callable[..., Dataset] | None = make
        self._sent: tuple[bytes, Sequence[np.ndarray]] = b"", ()
        self.made: Iterator[Any] | None = None

    def __call__(self, index: int) -> WorkerDataset:
        """The dataset of the worker for which the code runs."""
        if self._make is None:
            # Not before: what is in it asks which worker it is on.
            self._make = peer.loaded(*self._sent)
        return WorkerDataset(self._dataset)

    def _dataset(self) -> Dataset:
        make = self._make
        assert make is not None, "it was loaded before"
        dataset = make(*_arguments(make))
        once = only_once(dataset)
        if once is not None and once is self.made:
            raise ValueError(
                "The function of a per-worker dataset returned an iterator that the "
                "coordinator has made, of which the workers would take elements from "
                "each other. Make it in the function."
            )
        return dataset

    def __getstate__(self) -> dict[str, object]:
        # What refers to the strategy and its variables means the worker's own there.
        with _context.entered(is_shipping=True):
            return {"_make": None, "_sent": peer.dumped(self._make), "made": None}


@final
class IteratorBuilder:
    """Begins to read a dataset on a worker."""

    def __init__(self, positions: dict[int, State] | None) -> None:
        self._positions = positions

    def __call__(self, index: int, dataset: WorkerDataset) -> Iterator[Any]:
        """Its elements, read ahead."""
        if self._positions is None:
            return dataset.read()
        return dataset.read_on(self._positions.get(index))

    def __getstate__(self) -> dict[str, object]:
        # A copy, because other workers may go on while this is pickled.
        positions = self._positions
        return {"_positions": None if positions is None else dict(positions)}


def _arguments(make: Callable[..., Dataset]) -> tuple[InputContext, ...]:
    """What the function is called with."""
    try:
        signature = inspect.signature(make)
    except ValueError:  # a builtin without a signature: its call will tell
        return ()
    surroundings = _worker.current()
    assert surroundings is not None, "a worker builds it"
    context = InputContext(1, 0, surroundings.replicas.count)
    for arguments in ((), (context,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return arguments
    raise TypeError(
        f"`{getattr(make, '__name__', make)}{signature}` was given to "
        "`create_per_worker_dataset`; a function without arguments, or of an "
        "`InputContext`, was wanted. `functools.partial` gives others."
    )


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
        surroundings: WorkerContext,
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


DatasetOfShard = Callable[[int, int], Dataset]
"""Makes the dataset of a shard, of its number and of how many shards there are."""


@final
class ShardIterator(IteratorArgument):
    """Begins to read the shard on any worker that is given it."""

    def __init__(self, make: Callable[[], Dataset], element: Element) -> None:
        source = WorkerResource(DatasetBuilder(make))
        self._element = element
        self._resource = WorkerResource(IteratorBuilder(None), (source,))

    @property
    def element(self) -> Element:
        """What each element is like."""
        return self._element

    @property
    def resource(self) -> WorkerResource:
        """The iterator on each worker that has it."""
        return self._resource

    @property
    def tells_position(self) -> bool:
        """False: what was lost is read again from the beginning."""
        return False

    def keep_position(self, worker: int, position: object) -> NoReturn:
        """Not asked for."""
        raise AssertionError("no position is told")


def shard_iterators(
    make: DatasetOfShard, shards: int, surroundings: WorkerContext
) -> Sequence[ShardIterator]:
    """An iterator for each shard."""
    makes = [functools.partial(make, shard, shards) for shard in range(shards)]
    element = _element(makes, surroundings)
    return [ShardIterator(each, element) for each in makes]


def _element(
    makes: Sequence[Callable[[], Dataset]], surroundings: WorkerContext
) -> Element:
    """That of the first shard that is not empty."""
    for make in makes:
        dataset = PerWorkerDataset(make, surroundings, 1)
        with contextlib.suppress(NoElements):
            return dataset.element
    raise ValueError(
        f"`evaluate` was given a dataset without elements: none of its {len(makes)} "
        "shards has any."
    )


def experimental_get_current_worker_index() -> jax.Array | int:
    """The index of the worker that runs this code, from 0.

    In a scheduled function, which is traced once for all workers, an int32 scalar that
    only the worker knows: choose by it with `jnp.where` or `jax.lax.cond`. In the
    function of a per-worker dataset, which each worker calls, an int of Python; while
    the coordinator calls that to learn what elements are like, 0.

    Raises:
      ContextError: in other code. It is a `RuntimeError`.

    >>> import jaxstrategy as js
    >>> index = js.coordinator.experimental_get_current_worker_index
    >>> strategy = js.ParameterServerStrategy(workers=2, parameter_servers=1,
    ...                                       backend="threads")
    >>> with js.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...     dataset = coordinator.create_per_worker_dataset(
    ...         lambda: [np.arange(4)[index()::2]])
    ...     @coordinator.function
    ...     def is_own(iterator):
    ...         return next(iterator)[0] == index()
    ...     coordinator.schedule(is_own, (iter(dataset),)).fetch()
    np.True_
    """
    surroundings = _worker.current()
    if surroundings is not None:
        return surroundings.index
    recorder = _recorder.current()
    if recorder is not None and recorder.index is not None:
        return recorder.index
    raise ContextError(
        "`experimental_get_current_worker_index` was called by code that no worker "
        "runs. Call it in a function that a `ClusterCoordinator` schedules, or in the "
        "one given to `create_per_worker_dataset`."
    )
