"""One attempt at the job: start all workers, watch them until the last has ended."""

from __future__ import annotations

import collections
import dataclasses
import queue
import signal
import time
from collections.abc import Mapping, Sequence
from typing import final

from jaxstrategy.launch._launch_options import Options
from jaxstrategy.launch._machines import AbstractMachines
from jaxstrategy.launch._output import Screen
from jaxstrategy.launch._workers import Asked, Ended, Events, Worker
from jaxstrategy.processes import _exit_codes
from jaxstrategy.processes._exit_codes import ExitCode, Restart
from jaxstrategy.processes._secret import Secret


@final
@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt.

    Attributes:
      ended: the workers that ended by themselves, in the order of their end.
      killed: the ranks that the launcher had to kill.
      tails: by rank, the last lines printed.
      asked: the signal by which the launcher was asked to stop, None if it was not.
      late: what a worker said of those that were late.
      begun: when the attempt began, by a clock of this computer.
      seconds: by rank, how long it ran.
    """

    ended: tuple[Ended, ...]
    killed: tuple[int, ...]
    tails: dict[int, tuple[bytes, ...]]
    asked: int | None
    late: tuple[str, ...] = ()
    begun: float = 0.0
    seconds: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def cause(self) -> Ended | None:
        """The first failure; one that is a consequence, if there is no other.

        None if no worker failed: all returned 0, or saved their state, or stopped as
        the launcher's own signal asked.
        """
        own = [end for end in self._failed if not _is_consequence(end.code)]
        return next(iter(own or self._failed), None)

    @property
    def consequences(self) -> dict[int, list[int]]:
        """The ranks that failed besides, by their code."""
        ranks = collections.defaultdict(list)
        for end in self._failed:
            if end != self.cause:
                ranks[end.code].append(end.rank)
        return ranks

    @property
    def preempted(self) -> bool:
        """Whether no worker failed, and one has ended to be started again."""
        return self.restart_code is not None

    @property
    def restart_code(self) -> ExitCode | None:
        """The code by which a worker asks to be started again, if none has failed."""
        if self.cause is not None or self.killed:
            return None
        asking = ExitCode.that_restart(Restart.UNCOUNTED)
        codes = (ExitCode.of(end.code) for end in self.ended)
        return next((code for code in codes if code in asking), None)

    @staticmethod
    def is_good(code: int) -> bool:
        """Whether a worker that ends with `code` has done what it should."""
        return _exit_codes.is_good(code)

    @property
    def _failed(self) -> list[Ended]:
        return [end for end in self.ended if is_failure(end.code, self.asked)]


def is_failure(code: int, asked: int | None) -> bool:
    """Whether a worker that ends with `code` should end the others too."""
    return not _exit_codes.is_good(code) and not is_stopped(code, asked)


def is_stopped(code: int, asked: int | None) -> bool:
    """Whether a worker ended, without saving, by the signal that all were sent.

    The first to end takes the others with it.
    """
    if asked is None:
        return False
    return code in (-asked, 128 + asked) or _is_consequence(code)


def _is_consequence(code: int) -> bool:
    row = ExitCode.of(code)
    return row is not None and row.is_consequence


@final
class Attempt:
    """The workers of one attempt, and what has become of them."""

    def __init__(
        self, options: Options, workers: Sequence[Worker], events: Events
    ) -> None:
        self._grace = options.grace
        self._stop_grace = options.stop_grace
        self._workers = {worker.rank: worker for worker in workers}
        self._events = events
        self._ended: list[Ended] = []
        self._asked: int | None = None
        self._deadline: float | None = None
        self._begun = time.monotonic()
        self._seconds: dict[int, float] = {}

    def outcome(self) -> Outcome:
        """Wait until all workers are over, and clear up after them."""
        while len(self._ended) < len(self._workers):
            match self._next():
                case Ended() as end:
                    self._end(end)
                case Asked(number):
                    self._ask(number)
                case None:
                    self._kill()
        for worker in self._workers.values():
            worker.close()
        return Outcome(
            tuple(end for end in self._ended if not self._was_killed(end)),
            tuple(sorted(end.rank for end in self._ended if self._was_killed(end))),
            {rank: worker.tail for rank, worker in self._workers.items()},
            self._asked,
            tuple(worker.late for worker in self._workers.values() if worker.late),
            self._begun,
            self._seconds,
        )

    def _next(self) -> Ended | Asked | None:
        """The next event; None once the time of grace is over."""
        wait = None if self._deadline is None else self._deadline - time.monotonic()
        try:
            return self._events.get(timeout=None if wait is None else max(wait, 0))
        except queue.Empty:
            return None

    def _end(self, end: Ended) -> None:
        self._ended.append(end)
        self._seconds[end.rank] = time.monotonic() - self._begun
        if is_failure(end.code, self._asked) or is_stopped(end.code, self._asked):
            deadline = time.monotonic() + self._grace
            self._deadline = min(deadline, self._deadline or deadline)

    def _ask(self, number: int) -> None:
        if self._asked is not None:
            self._kill()
            return
        self._asked = number
        if self._deadline is None:
            self._deadline = time.monotonic() + self._stop_grace
        for worker in self._workers.values():
            worker.send(number)

    def _kill(self) -> None:
        self._deadline = None
        for worker in self._workers.values():
            worker.kill()

    def _was_killed(self, end: Ended) -> bool:
        return self._workers[end.rank].killed and end.code == -signal.SIGKILL


def attempt(
    options: Options,
    processes: int,
    number: int,
    secret: Secret,
    screens: tuple[Screen, Screen],
    events: Events,
    machines: AbstractMachines,
) -> Outcome:
    """Run the job once, on `processes` processes.

    Raises:
      ClusterError: they cannot be started.
    """
    try:
        started = machines.start(options, processes, number, secret)
        workers = [
            Worker(rank, process, screens, options.verbose)
            for rank, process in started.items()
        ]
        return Attempt(options, workers, events).outcome()
    finally:
        machines.release()
