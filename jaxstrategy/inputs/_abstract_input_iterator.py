"""An iterator over batches whose position can be saved: `AbstractInputIterator`."""

from __future__ import annotations

import abc
from collections.abc import Iterator

from jaxstrategy.inputs.sources._source import State
from jaxstrategy.values._types import PyTree


class AbstractInputIterator(Iterator[PyTree], abc.ABC):
    """Batches, and the position among them, which checkpoints save."""

    @abc.abstractmethod
    def get_state(self) -> State:
        """The position, as JSON can hold it.

        Raises:
          TypeError: the source cannot be resumed.
        """

    @abc.abstractmethod
    def set_state(self, state: State) -> None:
        """Goes on after the batch after which `state` was taken.

        Raises:
          ValueError: it is the state of something else.
          TypeError: the source cannot be resumed.
        """
