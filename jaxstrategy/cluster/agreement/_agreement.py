"""Agreement of all processes about one topic: an exchange of values."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, final

from jaxstrategy.cluster.board._board import AbstractBoard
from jaxstrategy.cluster.connections._fields import Json

# The watchdog looks on, and the end of another process ends the wait: a deadline of its
# own would only end jobs one of whose processes compiles or reads for long.
AS_LONG_AS_IT_TAKES = 1e6


class Watch(Protocol):
    """A watchdog: it notes waits, and ends the process when one takes too long."""

    def waiting(
        self, what: str, busy: str | None = None
    ) -> AbstractContextManager[object]:
        """A block that cannot go on without the other processes."""
        ...

    def reading(self, what: str) -> AbstractContextManager[object]:
        """A block for which the other processes may wait."""
        ...

    def step_started(
        self, what: object, where: object = None, busy: str | None = None
    ) -> None:
        """Note that the call of a step of all processes begins."""
        ...

    def step_dispatched(self) -> None:
        """Note that the call of the step has returned."""
        ...


class AbstractAgreement(abc.ABC):
    """Agreement of all processes about one topic.

    All of them call `exchange` equally often. What follows from all answers alone is
    then the same in each process: that is what they agree on.

    Attributes:
      topic: its name, the same in all processes; None if there is but one process.
    """

    topic: str | None = None

    @abc.abstractmethod
    def exchange(
        self, said: Json, timeout_seconds: float = AS_LONG_AS_IT_TAKES
    ) -> list[Json]:
        """Say something; get what all processes say, in the order of their ids.

        The n-th call meets the n-th of each other process.

        Any thread may call it, for one topic one at a time.

        Args:
          said: what JSON can hold.
          timeout_seconds: how long to wait for the others.

        Raises:
          ClusterError: a process has ended, or has not come in time.
        """

    def reading(self, what: str) -> AbstractContextManager[object]:
        """A block in which this process reads `what`; the others may wait for it."""
        return nullcontext()

    def waiting(
        self, what: str, busy: str | None = None
    ) -> AbstractContextManager[object]:
        """A block in which this process waits for `what` together with the others.

        Args:
          what: is waited for, in words.
          busy: what this process does by itself meanwhile, if it does not wait.
        """
        return nullcontext()


@final
class LoneAgreement(AbstractAgreement):
    """Agreement of a process with itself, where there is no other.

    >>> LoneAgreement().exchange(3)
    [3]
    """

    def exchange(
        self, said: Json, timeout_seconds: float = AS_LONG_AS_IT_TAKES
    ) -> list[Json]:
        """A list of what it says."""
        return [said]


@final
class ProcessAgreement(AbstractAgreement):
    """Agreement of several processes.

    Args:
      board: carries what each says to all.
      watch: is told of the waits.
      topic: its name, the same in all processes.
    """

    def __init__(self, board: AbstractBoard, watch: Watch, topic: str) -> None:
        self.topic = topic
        self._board = board
        self._watch = watch

    def exchange(
        self, said: Json, timeout_seconds: float = AS_LONG_AS_IT_TAKES
    ) -> list[Json]:
        """Gather over the board; the end of a process makes it an error."""
        return self._board.gather(str(self.topic), said, timeout_seconds)

    def reading(self, what: str) -> AbstractContextManager[object]:
        """Noted for those that wait for it, here or elsewhere."""
        return self._watch.reading(what)

    def waiting(
        self, what: str, busy: str | None = None
    ) -> AbstractContextManager[object]:
        """Ended by the watchdog if it takes too long."""
        return self._watch.waiting(what, busy)
