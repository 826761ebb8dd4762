"""An iterator over a distributed dataset that can begin again: `InputIterator`."""

from __future__ import annotations

from typing import Any, Self, final

from jaxstrategy._errors import OutOfRangeError
from jaxstrategy.inputs._abstract_input_iterator import AbstractInputIterator
from jaxstrategy.inputs._dataset import DistributedDataset
from jaxstrategy.inputs._iterator import DistributedIterator
from jaxstrategy.inputs._optional import Optional
from jaxstrategy.inputs.sources._source import State
from jaxstrategy.values._types import PyTree


@final
class InputIterator(AbstractInputIterator):
    """The batches of all replicas, one pass after the other.

    Made by `make_dataset_iterator` and `make_input_fn_iterator` of a strategy of
    TensorFlow 1. The first pass begins by itself. TensorFlow's `session.run` of what
    `initialize()` returns is not needed: it is an empty list.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> iterator = strategy.make_dataset_iterator([np.arange(4)])
    >>> iterator.get_next().values
    (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
    >>> iterator.get_next_as_optional().has_value()
    False
    >>> iterator.initialize()
    []
    >>> len(list(iterator))
    1
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._iterator: DistributedIterator | None = None
        self._is_read = False

    def initialize(self) -> list[Any]:
        """Starts again at the first batch.

        Returns:
          The operations that a session would have to run: none.

        Raises:
          TypeError: the data can be read only once, and a batch was read; the message
            says what to give instead.
        """
        if self._is_read:
            self.close()
            self._iterator = None
            self._is_read = False
            self._iterator = iter(self._dataset)
        return []

    @property
    def initializer(self) -> list[Any]:
        """The list that `initialize()` returns; asking for it calls that.

        Raises:
          TypeError: as `initialize()`.
        """
        return self.initialize()

    def __next__(self) -> PyTree:
        return next(self._reading())

    def get_next(self, name: str | None = None) -> PyTree:
        """The next batch, with a `PerReplica` for each array.

        Args:
          name: of an operation in TensorFlow; nothing here.

        Raises:
          OutOfRangeError: there is none.
        """
        try:
            return next(self._reading())
        except StopIteration:
            raise OutOfRangeError(
                "The end of the data. Call `iterator.initialize()` for another pass, "
                "or `iterator.get_next_as_optional()`, which says whether there is a "
                "batch."
            ) from None

    def get_next_as_optional(self, name: str | None = None) -> Optional:
        """The next batch, or nothing at the end: `optional.has_value()` tells."""
        return self._reading().get_next_as_optional()

    def get_state(self) -> State:
        """The position in the data, for `set_state`; checkpoints save it.

        Raises:
          TypeError: the source cannot be resumed.
        """
        return self._begun().get_state()

    def set_state(self, state: State) -> None:
        """Goes on after the batch after which `state` was taken.

        Raises:
          ValueError: it is the state of something else, or of another dataset.
          TypeError: the source cannot be resumed.
        """
        self._reading().set_state(state)

    @property
    def element_spec(self) -> PyTree:
        """The type of a batch, `jax.ShapeDtypeStruct`s instead of arrays."""
        return self._begun().element_spec

    def close(self) -> None:
        """Stops reading."""
        if self._iterator is not None:
            self._iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"InputIterator({self._dataset!r})"

    def _begun(self) -> DistributedIterator:
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return self._iterator

    def _reading(self) -> DistributedIterator:
        self._is_read = True
        return self._begun()
