"""A barrier for the processes that write a checkpoint: `Barrier`."""

from __future__ import annotations

from typing import final

from jaxstrategy.checkpoint.processes._checkpoint_agreement import first_line
from jaxstrategy.processes._job import Processes


class ElsewhereError(OSError):
    """Another process could not write its part; the text says which, and why."""


@final
class Barrier:
    """Lets all processes fail when one of them does.

    Orbax's own, which this replaces, lets the others wait for 20 minutes.

    Args:
      processes: that meet.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._watchdog = processes.watchdog
        self._name = ""

    def begin(self, name: str) -> None:
        """From now on they meet because of this checkpoint."""
        self._name = f"checkpoint {name}"
        self._watchdog.writes = self._name

    def end(self) -> None:
        """Nothing is written any more."""
        self._watchdog.writes = None

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
        self._gather(first_line(error), timeout_seconds)

    def _gather(self, failure: str | None, seconds: float) -> None:
        self._watchdog.writes = None  # this process waits for those that still do
        agreement = self._processes.agreement(self._name)
        told = agreement.exchange(failure, seconds)
        self._watchdog.writes = self._name
        for process, reason in enumerate(told):
            if reason is not None and failure is None:
                raise ElsewhereError(f"process {process}: {reason}")
