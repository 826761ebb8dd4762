"""The board: shared values, and the state of each process of a job."""

from __future__ import annotations

import abc
import dataclasses
import os
import socket
import threading
from collections.abc import Callable
from typing import final

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.board._board_messages import Status
from jaxstrategy.cluster.connections._fields import Json
from jaxstrategy.cluster.meeting._member import Member

LATE_SECONDS = 3.0
"""Processes report each second; one that is late by so much is reported as silent."""


@dataclasses.dataclass(frozen=True)
class Departure:
    """A process that takes part no more; prints as a clause about it.

    Attributes:
      end: `"left"` (its script has ended), `"failed"` (by an exception, told in
        `text`), `"died"` (its connection broke) or `"silent"` (it stopped answering).
      status: its watchdog's last word, None if it never said one.
    """

    member: Member
    end: str
    text: str = ""
    status: Status | None = None

    def __str__(self) -> str:
        match self.end:
            case "left":
                return f"{self.member} has finished already"
            case "failed":
                return f"{self.member} failed: {self.text}"
            case "silent":
                return (
                    f"{self.member} has not answered for {self.text} s: it is "
                    "stopped, or its host is"
                )
        return (
            f"{self.member} has died: killed, out of memory or crashed; its own output "
            "may say more"
        )


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """The state of a process.

    Attributes:
      status: what its watchdog last said, None if nothing.
      end, text: None and empty while it runs, else as in `Departure`.
      silent_seconds: how long it has not answered; about 1 at most is usual.
    """

    member: Member
    status: Status | None
    end: str | None
    silent_seconds: float
    text: str = ""

    @property
    def busy(self) -> str | None:
        """Its own work, for which others may wait; None if it has none."""
        return self._heard["busy"] if self._heard else None

    @property
    def writes(self) -> str | None:
        """The checkpoint it writes in the background; None if it writes none."""
        return self._heard["writes"] if self._heard else None

    @property
    def _heard(self) -> Status | None:
        """Its last status if it runs and answers, else None."""
        is_recent = self.end is None and self.silent_seconds < LATE_SECONDS
        return self.status if is_recent else None


class AbstractBoard(abc.ABC):
    """Values that all processes share, and news of those that have ended.

    All methods may be called from any thread. Values are what JSON can say.

    Attributes:
      members: all processes, by their ids.
      index: which of them this one is.
      departures: the processes that have ended, by their ids.
      common_error: the text of an error that each process was given, by which each of
        them may end; None if there was none.
    """

    members: tuple[Member, ...]
    index: int
    departures: dict[int, Departure]
    common_error: str | None = None

    @abc.abstractmethod
    def put(self, key: str, value: Json) -> None:
        """Let all processes `get` a value; a second one replaces the first."""

    @abc.abstractmethod
    def get(self, key: str, timeout_seconds: float | None = None) -> Json:
        """The value that some process has put or will put within the time.

        Raises:
          ClusterError: none did, or none can any more.
        """

    @abc.abstractmethod
    def gather(
        self, key: str, value: Json, timeout_seconds: float | None = None
    ) -> list[Json]:
        """Contribute a value; get those of all processes, in the order of their ids.

        The n-th call with a key on one process meets the n-th on each other. Without a
        time of its own it waits the board's, and longer while a process is busy.

        Raises:
          ClusterError: not all did so in time, or one has ended; they are named.
        """

    def barrier(self, name: str, timeout_seconds: float | None = None) -> None:
        """Wait until all processes have come here; raises as `gather` does."""
        self.gather(f"barrier: {name}", None, timeout_seconds)

    @abc.abstractmethod
    def states(self) -> list[ProcessState]:
        """The state of each process, by their ids.

        Raises:
          ClusterError: process 0, which keeps them, does not answer.
        """

    def known_states(self) -> list[ProcessState]:
        """The same without a message: in process 0; empty in the others."""
        return []

    @abc.abstractmethod
    def on_departure(self, callback: Callable[[Departure], None]) -> None:
        """Have a function called, on another thread, for each process that ends.

        Those that have ended already are told at once.
        """

    def fail(self, text: str) -> None:
        """Tell all others that this process ends, and why; they end as well."""
        return  # nobody else is there

    def look_at_process_0(self) -> None:
        """Note that process 0 has ended if it has been silent for too long."""
        return  # this process keeps the board

    def forgive_silence(self) -> None:
        """Count the silence of process 0 from now: this one was itself stopped."""
        return


@final
class LoneBoard(AbstractBoard):
    """The board of a job of one process.

    >>> board = LoneBoard()
    >>> board.gather("rows", 12)
    [12]
    """

    def __init__(self) -> None:
        self.index = 0
        self.members = (Member(0, socket.gethostname(), os.getpid()),)
        self.departures = {}
        self._values: dict[str, Json] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: Json) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_seconds: float | None = None) -> Json:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_seconds):
                raise ClusterError(nobody_put(key, timeout_seconds or 0))
            return self._values[key]

    def gather(
        self, key: str, value: Json, timeout_seconds: float | None = None
    ) -> list[Json]:
        return [value]

    def states(self) -> list[ProcessState]:
        return [ProcessState(self.members[0], None, None, 0.0)]

    def on_departure(self, callback: Callable[[Departure], None]) -> None:
        pass  # nobody else is there


def nobody_put(key: str, seconds: float) -> str:
    """The reason why `get` failed."""
    return f"Nobody has put {key!r} on the board within {seconds:g} s."
