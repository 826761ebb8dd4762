"""How the processes that feed one strategy agree about each step."""

from __future__ import annotations

import abc
from typing import Any, final

from jaxstrategy.cluster._board import AbstractBoard


class Agreement(abc.ABC):
    """Of one pass over one dataset. All processes say something before each step."""

    @abc.abstractmethod
    def exchange(self, said: Any) -> list[Any]:
        """What all processes said, by process; called in the thread that reads.

        Args:
          said: what JSON can hold.
        """


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
      board: where they meet.
      name: of the pass, the same in all of them.
    """

    def __init__(self, board: AbstractBoard, name: str) -> None:
        self._board = board
        self._name = name

    def exchange(self, said: Any) -> list[Any]:
        """What all said. A process that ends makes it an error."""
        return self._board.gather(self._name, said, _AS_LONG_AS_IT_TAKES)


# Another process may be busy; whether it still makes progress is the watchdog's to say.
_AS_LONG_AS_IT_TAKES = 1e6
