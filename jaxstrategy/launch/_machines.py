"""Where the processes of a job run: `AbstractMachines`, and this machine alone."""

from __future__ import annotations

import abc
import sys
from typing import final

from jaxstrategy.launch import _environment
from jaxstrategy.launch._guarded_process import Guard, GuardedProcess, HeldPort
from jaxstrategy.launch._launch_options import Options
from jaxstrategy.launch._started_process import AbstractStartedProcess
from jaxstrategy.launch._workers import Ended, Events
from jaxstrategy.processes._secret import Secret

LOOPBACK = "127.0.0.1"


class AbstractMachines(abc.ABC):
    """Starts the processes of each attempt."""

    @abc.abstractmethod
    def start(
        self, options: Options, processes: int, attempt: int, secret: Secret
    ) -> dict[int, AbstractStartedProcess]:
        """Start `processes` processes, whose ends are events; by rank.

        Raises:
          ClusterError: they cannot be started, or the launcher was asked to stop.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Give back what the processes of an attempt had, once all have ended."""

    @abc.abstractmethod
    def close(self) -> None:
        """End whatever is left."""


@final
class ThisMachine(AbstractMachines):
    """The machine of the launcher.

    Args:
      events: which hear of the end of each process.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._guard = Guard()
        self._port: HeldPort | None = None

    def start(
        self, options: Options, processes: int, attempt: int, secret: Secret
    ) -> dict[int, AbstractStartedProcess]:
        coordinator = options.coordinator
        if not coordinator:
            self._port = HeldPort(LOOPBACK)
            coordinator = f"{LOOPBACK}:{self._port.number}"

        def started(local_rank: int, rank: int) -> GuardedProcess:
            return GuardedProcess(
                [sys.executable, *options.program],
                _environment.of_worker(
                    options, local_rank, processes, coordinator, attempt, secret
                ),
                f"rank {rank}",
                self._guard,
                lambda code: self._events.put(Ended(rank, code)),
            )

        first = options.node_rank * processes
        return {first + k: started(k, first + k) for k in range(processes)}

    def release(self) -> None:
        if self._port is not None:
            self._port.close()

    def close(self) -> None:
        self._guard.close()
