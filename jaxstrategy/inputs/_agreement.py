"""How the processes that feed one strategy agree about each step."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from jaxstrategy.cluster._processes import Processes


class Agreement(abc.ABC):
    """Of one pass over one dataset. All processes say something before each step."""

    @abc.abstractmethod
    def exchange(self, said: Any) -> list[Any]:
        """What all processes said, by process; called in the thread that reads.

        Args:
          said: what JSON can hold.
        """

    def reading(self, number: int) -> AbstractContextManager[object]:
        """A block in which this process reads the batch of this number."""
        return nullcontext()

    def waiting(self, number: int) -> AbstractContextManager[object]:
        """A block in which the loop of this process waits for the batch."""
        return nullcontext()

    def name_of(self, number: int) -> str | None:
        """What all processes call the batch of this number; None if there is one."""
        return None


@final
class Alone(Agreement):
    """Of one process."""

    def exchange(self, said: Any) -> list[Any]:
        """What it said."""
        return [said]


@final
class OfProcesses(Agreement):
    """Of several.

    Args:
      processes: they.
      name: of the pass, the same in all of them.
    """

    def __init__(self, processes: Processes, name: str) -> None:
        self._board = processes.board
        self._watchdog = processes.watchdog
        self._name = name

    def exchange(self, said: Any) -> list[Any]:
        """What all said. A process that ends makes it an error."""
        return self._board.gather(self._name, said, _AS_LONG_AS_IT_TAKES)

    def reading(self, number: int) -> AbstractContextManager[object]:
        """Noted for who waits for it, here or elsewhere."""
        return self._watchdog.reading(self.name_of(number))

    def waiting(self, number: int) -> AbstractContextManager[object]:
        """Ended by the watchdog if it takes too long."""
        return self._watchdog.waiting(self.name_of(number))

    def name_of(self, number: int) -> str:
        """Such as `batch 3 of input 0`."""
        return f"batch {number} of {self._name}"


# The loop that waits for the batch is watched; the thread that reads ahead need not be.
_AS_LONG_AS_IT_TAKES = 1e6
