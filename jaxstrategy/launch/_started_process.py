"""The interface of a process that was started somewhere: `AbstractStartedProcess`."""

from __future__ import annotations

import abc
from typing import Literal

Stream = Literal[0, 1]
"""Of what a process prints: 0 is its standard output, 1 its standard error."""


class AbstractStartedProcess(abc.ABC):
    """A process, on this machine or another; any thread may call it.

    Attributes:
      killed: whether `kill` came before its end.
    """

    killed: bool

    @abc.abstractmethod
    def read(self, stream: Stream) -> bytes:
        """What it prints next; waits for it, and is empty at the end."""

    @abc.abstractmethod
    def send(self, number: int) -> None:
        """Send a signal to the process itself; what it started is its own affair."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill what is left of the process and of all that it started."""

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for its end, and end what it left behind."""
