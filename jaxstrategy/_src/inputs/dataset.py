"""Datasets whose batches come divided over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NoReturn, TypeVar, final

import jax

from jaxstrategy._src.inputs.batches import ReplicaRange, Steps, Transfer
from jaxstrategy._src.inputs.input_options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from jaxstrategy._src.inputs.iterator import DistributedIterator
from jaxstrategy._src.inputs.library_sources import as_source
from jaxstrategy._src.inputs.sources import Dataset, Source
from jaxstrategy._src.processes.agreement import Agreement
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import whole, with_noun
from jaxstrategy._src.values.arrays import PyTree

_S = TypeVar("_S")


class DistributedDataset:
    """Batches for all replicas, as often as they are iterated over.

    Made by `strategy.experimental_distribute_dataset` and
    `strategy.distribute_datasets_from_function`. Each batch is the pytree that the
    source gave, with a `PerReplica` for each array. All batches have one shape: where
    rows are missing they are filled up, and `batch_mask`, `masked_mean` and
    `masked_sum` know it inside the step. With one replica batches are plain arrays of
    the rows that the source gave.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.experimental_distribute_dataset(
    ...     js.batches({"x": np.arange(6.0)}, batch_size=4)
    ... )
    >>> dataset
    DistributedDataset(js.batches, 2 steps)
    >>> for batch in dataset:
    ...     total = strategy.run(lambda batch: js.masked_sum(batch["x"]), (batch,))
    ...     print(strategy.reduce("sum", total))
    6.0
    9.0
    """

    def __init__(
        self,
        start: Callable[[], Steps],
        transfer: Transfer | None,
        options: InputOptions,
        name: str,
        sized: Source | None,
    ) -> None:
        self._start = start
        self._transfer = transfer
        self._options = options
        self._name = name
        self._sized = sized  # which knows how many steps there are, if anything does
        # Read to know what batches are like, and not yet given to anybody.
        self._begun: DistributedIterator | None = None
        self._spec: PyTree = None

    def __iter__(self) -> DistributedIterator:
        begun, self._begun = self._begun, None
        return self._iterator() if begun is None else begun

    def _iterator(self) -> DistributedIterator:
        steps = self._start()
        assert self._transfer is not None, "a deferred one does not start"
        return DistributedIterator(self._start, self._transfer, self._options, steps)

    @property
    def element_spec(self) -> PyTree:
        """The type of a batch: `jax.ShapeDtypeStruct`s, in `PerReplica`s if it has any.

        `strategy.explain` takes it in place of a batch. The first batch is read to know
        it; the next `iter` begins with that one.
        """
        if self._spec is None:
            if self._begun is None:
                self._begun = self._iterator()
            self._spec = self._begun.element_spec
        return self._spec

    def __len__(self) -> int:
        """The number of steps of a pass, if that is known before it ends."""
        length = None if self._sized is None else self._sized.length
        if length is None:
            raise TypeError(
                f"How many steps {self._name} has is not known. Count them, or give a "
                "source that has a length."
            )
        return length

    def reduce(self, initial_state: _S, reduce_func: Callable[[_S, PyTree], _S]) -> _S:
        """The state after `state = reduce_func(state, batch)` for each batch in turn.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> dataset = strategy.experimental_distribute_dataset([np.ones(4), np.ones(2)])
        >>> def add(total, batch):
        ...     sums = strategy.run(js.masked_sum, (batch,))
        ...     return total + strategy.reduce("sum", sums)
        >>> dataset.reduce(0.0, add)
        Array(6., dtype=float32)
        """
        state = initial_state
        for batch in self:
            state = reduce_func(state, batch)
        return state

    def __repr__(self) -> str:
        length = None if self._sized is None else self._sized.length
        steps = "" if length is None else f", {with_noun(length, 'step')}"
        return f"{type(self).__name__}({self._name}{steps})"


@final
class DeferredDataset(DistributedDataset):
    """Batches for the replicas of whichever worker reads them.

    Made by `experimental_distribute_dataset` and `distribute_datasets_from_function` of
    a `ParameterServerStrategy`. Its batches are on the workers: give it, or a function
    that makes it, to `ClusterCoordinator.create_per_worker_dataset`.

    Args:
      given: where batches come from; or a function of an `InputContext`.
      is_function: whether it is one.
      options: how they reach the replicas.

    Raises:
      TypeError: it is nothing that batches can be read from.

    >>> import jaxstrategy as js
    >>> strategy = js.ParameterServerStrategy(workers=2, parameter_servers=1,
    ...                                       backend="threads")
    >>> strategy.experimental_distribute_dataset([np.arange(4)])
    DeferredDataset(the list)
    """

    def __init__(
        self,
        given: Dataset | Callable[[InputContext], Dataset],
        is_function: bool,
        options: InputOptions,
    ) -> None:
        if is_function:
            name = getattr(given, "__name__", type(given).__name__)
        else:
            name = as_source(given).name  # it complains now, and not on each worker
        super().__init__(_not_here, None, options, name, None)
        self._given = given
        self._is_function = is_function

    @property
    def only_once(self) -> Iterator[Any] | None:
        """The iterator that it reads from, if that can be read only once."""
        given: Any = self._given
        return given if isinstance(given, Iterator) and not self._is_function else None

    def placed(self, replicas: Replicas) -> DistributedDataset:
        """The batches, divided over some replicas of this process.

        Raises:
          TypeError: the function gives nothing that batches can be read from.
        """
        given, is_function = self._given, self._is_function
        return divided(given, is_function, self._options, replicas, Agreement)

    def __len__(self) -> NoReturn:
        raise TypeError(
            "How many steps a dataset of a ParameterServerStrategy has is known on the "
            "workers only."
        )


def _not_here() -> NoReturn:
    raise ValueError(
        "A dataset of a ParameterServerStrategy was read directly, but its batches are "
        "for the workers. Pass it, or a function that makes it, to "
        "`ClusterCoordinator.create_per_worker_dataset`, and schedule functions of an "
        "iterator over what that returns."
    )


def divided(
    given: Dataset | Callable[[InputContext], Dataset],
    is_function: bool,
    options: InputOptions,
    replicas: Replicas,
    agree: Callable[[], Agreement],
) -> DistributedDataset:
    """The batches of a dataset, or of an input function, divided over replicas."""
    fed, sized = ReplicaRange.of(replicas), None
    if is_function:
        sources = [as_source(given(each)) for each in _contexts(fed, options)]
        name = getattr(given, "__name__", type(given).__name__)
    else:
        refuse_for_each_replica(options)
        sources = [as_source(given)]
        name = sources[0].name
        # A source knows its number of batches, not how many are too small.
        sized = None if options.leaves_out else sources[0]

    def start() -> Steps:
        passes = [each.start() for each in sources]
        return Steps(passes, not is_function, fed, agree(), options.remainder)

    return DistributedDataset(start, Transfer(replicas, fed), options, name, sized)


def _contexts(fed: ReplicaRange, options: InputOptions) -> Sequence[InputContext]:
    if options.experimental_replication_mode is InputReplicationMode.PER_WORKER:
        # A strategy of this process's devices has no part in what others read.
        index, count = jax.process_index(), jax.process_count()
        if fed.are_all:
            index, count = 0, 1
        return [InputContext(count, index, fed.total)]
    own = range(fed.first, fed.first + fed.local)
    return [InputContext(fed.total, replica, fed.total) for replica in own]


def refuse_for_each_replica(options: InputOptions) -> None:
    """Raise if one dataset is to be a pipeline for each replica."""
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise ValueError(
            "InputReplicationMode.PER_REPLICA is for input functions: use "
            "`strategy.distribute_datasets_from_function(fn, options)`. Here one "
            "dataset is divided over all replicas."
        )


@final
class Grouped(Iterable[tuple[PyTree, ...]]):
    """Tuples of batches. Made by `grouped`; a pass for each `iter`."""

    def __init__(self, dataset: Iterable[PyTree], k: int) -> None:
        self._dataset = dataset
        self._k = k

    def __iter__(self) -> Iterator[tuple[PyTree, ...]]:
        batches = iter(self._dataset)
        while True:
            group: list[PyTree] = []
            try:
                # Not `islice`, which would lose the batches before an error.
                while len(group) < self._k:
                    group.append(next(batches))
            except StopIteration:
                if group:
                    yield tuple(group)
                return
            except Exception:
                if group:
                    yield tuple(group)
                raise
            yield tuple(group)

    def __len__(self) -> int:
        """The number of tuples of a pass, if the dataset knows its length."""
        if not isinstance(self._dataset, Sized):
            raise TypeError(
                f"How many batches a {type(self._dataset).__name__} has is not known. "
                "Count the groups, or give a dataset that has a length."
            )
        return -(-len(self._dataset) // self._k)


def grouped(dataset: Iterable[PyTree], k: int) -> Grouped:
    """The batches of `dataset` in tuples of `k`; the last one may have fewer.

    For steps that are made several at a time, see `Strategy.several`. Nothing is read
    beyond the tuple that is asked for, so that the state of a `DistributedIterator` is
    the one after the last batch given. When the dataset raises, the batches before are
    given first.

    Args:
      dataset: batches; when it can be iterated over again, then so can the result.
      k: how many batches a tuple has.

    Returns:
      An iterable of tuples; `len` of it works where that of `dataset` does.

    Raises:
      ValueError: `k` is less than 1.
      TypeError: `k` is not a whole number; `dataset` cannot be iterated over.

    >>> list(grouped(range(5), 2))
    [(0, 1), (2, 3), (4,)]
    """
    if not isinstance(dataset, Iterable):
        raise TypeError(
            f"`dataset` was {dataset!r}, which cannot be iterated over; batches were "
            "wanted."
        )
    number = whole(k)
    if number is None:
        raise TypeError(
            f"`k` was {k!r}; the number of batches in a tuple was wanted, a whole "
            "number."
        )
    if number < 1:
        raise ValueError(f"`k` was {number}; a tuple has at least one batch.")
    return Grouped(dataset, number)
