"""The actor that starts one process on a machine of a Ray cluster, and watches it.

Ray sends this file to other machines, whose Python need not import the package for it:
it uses the standard library and Ray only.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import final

from jaxstrategy.launch._guarded_process import Guard, GuardedProcess, HeldPort
from jaxstrategy.launch._started_process import Stream

THREADS = 8
"""Of an actor: two for what it prints, one for its end, the rest for what is asked."""

# What Ray sets for its own workers, or what names another process of a job.
_NOT_HANDED_ON = ("PYTHONBREAKPOINT", "RAY_JOB_ID", "RAY_RAYLET_PID", "TF_CONFIG")


@final
class ProcessActor:
    """One process of one machine. Its guard outlives it, and ends the process then."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._process: GuardedProcess | None = None
        self._ports: list[HeldPort] = []
        self._code: concurrent.futures.Future[int] = concurrent.futures.Future()

    def machine(self) -> tuple[str, str]:
        """The identifier of the machine, and its address."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return node, ray.util.get_node_ip_address()

    def free_port(self, host: str) -> int:
        """A port of this machine that is held for the process until this actor ends."""
        self._ports.append(HeldPort(host))
        return self._ports[-1].number

    def start(
        self,
        program: Sequence[str],
        variables: Mapping[str, str],
        folder: str | None,
        script: str | None,
        joined: bool = False,
    ) -> None:
        """Start the process.

        Args:
          program: the arguments of `python`.
          variables: of its environment, besides those of this machine.
          folder: where it runs; None: where this actor does.
          script: a file that must be there.
          joined: whether it writes errors to the same stream as all else.

        Raises:
          FileNotFoundError: there is no such folder or script.
        """
        where = folder or os.getcwd()
        if not os.path.isdir(where):
            raise FileNotFoundError(f"{where} is no folder of {socket.gethostname()}")
        if script and not os.path.isfile(os.path.join(where, script)):
            raise FileNotFoundError(
                f"{script} is not in {where} of {socket.gethostname()}"
            )
        kept = {k: v for k, v in os.environ.items() if k not in _NOT_HANDED_ON}
        command = [sys.executable, *program]
        # Ray blocks SIGINT in its workers (2.60), and a process inherits that.
        old = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._process = GuardedProcess(
                command,
                kept | dict(variables),
                "the process",
                self._guard,
                self._code.set_result,
                joined=joined,
                folder=where,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)

    def read(self, stream: Stream) -> bytes:
        """As `AbstractStartedProcess`."""
        return self._started.read(stream)

    def wait(self) -> int:
        """Wait for its end; its code as `subprocess` has it."""
        return self._code.result()

    def send(self, number: int) -> None:
        """As `AbstractStartedProcess`."""
        self._started.send(number)

    def kill(self) -> None:
        """As `AbstractStartedProcess`."""
        self._started.kill()

    def close(self) -> None:
        """As `AbstractStartedProcess`."""
        self._started.close()

    @property
    def _started(self) -> GuardedProcess:
        assert self._process is not None
        return self._process
