"""Datasets that each worker reads by itself, and its index."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, final

import jax
import numpy as np

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.inputs.dataset import DeferredDataset, DistributedDataset
from jaxstrategy._src.inputs.input_options import InputContext
from jaxstrategy._src.inputs.iterator import DistributedIterator, Prefetcher
from jaxstrategy._src.inputs.library_sources import as_source
from jaxstrategy._src.inputs.sources import Dataset, Source, SourceIterator, State
from jaxstrategy._src.parameter_servers import peer, worker as _worker
from jaxstrategy._src.parameter_servers.worker import (
    LookaheadIterator,
    WorkerContext,
    WorkerResource,
    leaves_of,
    structure_of,
)
from jaxstrategy._src.scheduled import trace as _trace
from jaxstrategy._src.scheduled.arguments import Element, IteratorArgument
from jaxstrategy._src.scheduled.values import PerWorkerValue
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.values.per_replica import PerReplica

_AHEAD = 2


class NoElements(ValueError):
    """A dataset is empty, and an element of it is needed."""


@final
class WorkerDataset:
    """The dataset of one worker, read from the beginning as often as asked for."""

    def __init__(self, make: Callable[[], Dataset]) -> None:
        self._make = make
        self.only_once: Iterator[Any] | None = None
        self._read: Source | DistributedDataset | None = self._made()

    def first(self) -> PyTree:
        """The first element; nothing is read ahead, and what was begun is ended."""
        with contextlib.closing(self.started()) as started:
            try:
                return _next(started)[0]
            except StopIteration:
                raise NoElements(
                    "The per-worker dataset has no elements, so that it is not known "
                    "what functions would be given. Let it have at least one, on the "
                    "coordinator, too."
                ) from None

    def check_resumable(self) -> None:
        """Raise if reading cannot go on elsewhere."""
        with contextlib.closing(self.started()) as started:
            started.get_state()

    def started(self) -> SourceIterator | DistributedIterator:
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
        try:
            return as_source(made)
        except TypeError as error:
            raise UnexpectedDataset(f"Unexpected dataset type! {error}") from None


class UnexpectedDataset(TypeError, ValueError):
    """Something was given as a dataset, or returned as one, that is none."""


def only_once(dataset: Dataset) -> Iterator[Any] | None:
    """The iterator that a dataset is, or is made of; None if it begins anew."""
    if isinstance(dataset, DeferredDataset):
        return dataset.only_once
    return dataset if isinstance(dataset, Iterator) else None


def _next(
    started: SourceIterator | DistributedIterator, tells_position: bool = False
) -> tuple[PyTree, Any]:
    """The next element, and where to go on after it."""
    element = next(started)
    # The source may overwrite its arrays when it is asked for the next one.
    if not (isinstance(started, DistributedIterator) or started.are_own):
        element = jax.tree.map(
            lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, element
        )
    return element, started.get_state() if tells_position else None


@final
class DatasetBuilder:
    """Calls the user's function on a worker."""

    def __init__(self, make: Callable[..., Dataset]) -> None:
        self._make: Callable[..., Dataset] | None = make
        self._sent = peer.Dumped(b"", [])
        self.made: Iterator[Any] | None = None

    def __call__(self, index: int) -> WorkerDataset:
        """The dataset of the worker for which the code runs."""
        if self._make is None:
            # Not before: what is in it asks which worker it is on.
            self._make = self._sent.loaded()
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


def begin(
    positions: list[State | None] | None, index: int, dataset: WorkerDataset
) -> LookaheadIterator:
    """Begins to read a dataset on a worker; from where it was, if that is known."""
    started, tells = dataset.started(), positions is not None
    if positions is not None and (position := positions[index]) is not None:
        started.set_state(position)
    # Nothing that reads ahead may hold the iterator, or nothing would end it.
    read = functools.partial(_next, started, tells)
    if isinstance(started, DistributedIterator):  # it reads ahead by itself
        return LookaheadIterator(read, started.close, tells)
    ahead = Prefetcher(read, _AHEAD)

    def close() -> None:
        # What another thread still reads from cannot be closed.
        if ahead.close():
            started.close()

    return LookaheadIterator(ahead.__next__, close, tells)


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
    """A dataset that each worker reads completely, unless it is told otherwise.

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
            here = builder(0)
            if resume:
                here.check_resumable()
        builder.made = here.only_once
        if builder.made is not None and not _is_function(given):
            raise UnexpectedDataset(
                f"Unexpected dataset type! The {type(given).__name__} can be read only "
                "once, but each worker reads all of it. Give a function that makes "
                "one: `lambda: read()` instead of `read()`."
            )
        self._here = [here]  # until an element was read
        self._one_reader = threading.Lock()
        self._resource = WorkerResource(builder)

    def __iter__(self) -> PerWorkerIterator:
        """A new iterator on each worker, which begins with the first element."""
        if _trace.current() is not None:
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
        return self._known[0]

    def element(self) -> Element:
        """What each element is like."""
        return self._known[1]

    @functools.cached_property
    def _known(self) -> tuple[PyTree, Element]:
        with self._one_reader:
            if "_known" in vars(self):  # another thread was faster
                return self._known
            with self._surroundings.entered():
                first = self._here[0].first()
            self._here.clear()
            leaves, of_type = leaves_of(first)
            structure = structure_of(first)
            types = [
                PerReplica(spec) if is_split else spec
                for x, is_split, is_mask in zip(
                    leaves, of_type.split, of_type.masks, strict=True
                )
                for spec in [jax.ShapeDtypeStruct(x.shape, x.dtype)]
                if not is_mask
            ]
            spec = jax.tree.unflatten(structure, types)
            self._known = found = spec, Element(of_type, structure)
        return found


def _not_here(method: str) -> Any:
    def refuse(self: object) -> NoReturn:
        """None: the iterators are on the workers.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(
            f"`{method}` of a per-worker iterator was called on the coordinator, but "
            "its elements are on the workers. Pass it to a scheduled function, and "
            "call `next(iterator)` there."
        )

    return refuse


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
        positions: list[Any] | None = [None] * workers if resume else None
        builder = functools.partial(begin, positions)
        resource = WorkerResource(builder, (source,))
        IteratorArgument.__init__(self, dataset.element, resource, positions)

    @property
    def element_spec(self) -> PyTree:
        """The type of an element of one worker."""
        return self._dataset.element_spec

    values: Any = property(_not_here("values"))
    __next__ = _not_here("next")
    get_next = _not_here("get_next")
    get_next_as_optional = _not_here("get_next_as_optional")

    def __len__(self) -> int:
        return self._workers

    def __repr__(self) -> str:
        return f"<PerWorkerIterator on {self._workers} workers>"


def _is_function(given: Any) -> bool:
    return callable(given) and not isinstance(given, type | Iterable)


DatasetOfShard = Callable[[int, int], Dataset]
"""Makes the dataset of a shard, of its number and of how many shards there are."""


def shard_iterators(
    make: DatasetOfShard, shards: int, surroundings: WorkerContext
) -> list[IteratorArgument]:
    """An iterator for each shard, on any worker that is given it."""
    makes = [functools.partial(make, shard, shards) for shard in range(shards)]
    for each in makes:
        with contextlib.suppress(NoElements):
            element = PerWorkerDataset(each, surroundings, 1).element()
            break
    else:
        raise ValueError(
            "`evaluate` was given a dataset without elements: none of its "
            f"{len(makes)} shards has any."
        )
    sources = [WorkerResource(DatasetBuilder(each)) for each in makes]
    builder = functools.partial(begin, None)
    iterators = [WorkerResource(builder, (source,)) for source in sources]
    return [IteratorArgument(lambda: element, each) for each in iterators]


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
    recorder = _trace.current()
    if recorder is not None and recorder.index is not None:
        return recorder.index
    raise ContextError(
        "`experimental_get_current_worker_index` was called by code that no worker "
        "runs. Call it in a function that a `ClusterCoordinator` schedules, or in the "
        "one given to `create_per_worker_dataset`."
    )
