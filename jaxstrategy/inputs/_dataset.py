"""A dataset whose batches come divided over the replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jaxstrategy.inputs._input_options import InputOptions
from jaxstrategy.inputs._iterator import DistributedIterator
from jaxstrategy.inputs._steps import Steps
from jaxstrategy.inputs._transfer import Transfer
from jaxstrategy.text._units import with_noun
from jaxstrategy.values._types import PyTree

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
        transfer: Transfer,
        options: InputOptions,
        name: str,
        length: Callable[[], int | None],
    ) -> None:
        self._start = start
        self._transfer = transfer
        self._options = options
        self._name = name
        self._length = length
        # Read to know what batches are like, and not yet given to anybody.
        self._begun: DistributedIterator | None = None
        self._spec: PyTree = None

    def __iter__(self) -> DistributedIterator:
        begun, self._begun = self._begun, None
        return self._iterator() if begun is None else begun

    def _iterator(self) -> DistributedIterator:
        return DistributedIterator(self._start, self._transfer, self._options)

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
        """The number of steps of a pass.

        Raises:
          TypeError: that is not known before it ends, or it has no end.
        """
        length = self._length()
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
        length = self._length()
        steps = "" if length is None else f", {with_noun(length, 'step')}"
        return f"DistributedDataset({self._name}{steps})"
