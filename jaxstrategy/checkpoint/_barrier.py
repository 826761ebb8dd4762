"""Where processes wait for each other while a checkpoint is written: `Barrier`."""

from __future__ import annotations

from typing import final

from jaxstrategy.checkpoint import _arguments
from jaxstrategy.cluster._board import AbstractBoard


class ElsewhereError(OSError):
    """Another process could not write its part; the text says which, and why."""


@final
class Barrier:
    """Lets all processes fail when one of them does.

    Orbax's own, which this replaces, lets the others wait for 20 minutes.

    Args:
      board: where they meet.
    """

    def __init__(self, board: AbstractBoard) -> None:
        self._board = board
        self._name = ""

    def begin(self, name: str) -> None:
        """From now on they meet because of this checkpoint."""
        self._name = f"checkpoint {name}"

    def meet(self, *, key: str, timeout_ms: int) -> None:
        """Wait for all, as Orbax asks for it.

        Raises:
          ElsewhereError: one that fails came to say so.
          ClusterError: one ended, or did not come in time.
        """
        del key  # one for all: who fails does not know where the others are
        self._gather(None, timeout_ms / 1000)

    def fail(self, error: Exception, timeout_seconds: float) -> None:
        """Tell the others where they wait; raises as `meet` does."""
        self._gather(_arguments.first_line(error), timeout_seconds)

    def _gather(self, failure: str | None, seconds: float) -> None:
        told = self._board.gather(self._name, failure, seconds)
        for process, reason in enumerate(told):
            if reason is not None and failure is None:
                raise ElsewhereError(f"process {process}: {reason}")
