"""How the processes that feed one strategy agree about each step."""

from __future__ import annotations

import abc
from typing import Any, final


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
