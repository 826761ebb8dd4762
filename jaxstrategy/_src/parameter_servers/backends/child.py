"""The program of a child: runs as a file, and imports the package when it is told to.

Its arguments are the number of an inherited socket, and its name for those who list
processes. A thread reads the socket from the first moment: its end is that of the
parent, however that came, and then the child ends with all that it has started.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, final

SERVER, WORKER = "parameter server", "worker"
Task: TypeAlias = dict[str, Any]
"""What a child is to do, as JSON has it."""


@final
class Lifeline:
    """A child's hold on its parent, and the parent's on the child."""

    def __init__(self, sock: socket.socket) -> None:
        self.over = threading.Event()
        self._sock = sock
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="lifeline", daemon=True).start()

    def task(self) -> Task:
        """What this child is to do, once the parent has said it."""
        return self._tasks.get()

    def say_ready(self) -> None:
        """Tell the parent that calls will be answered."""
        with contextlib.suppress(OSError):  # the reader finds the end too
            self._sock.sendall(b"ready\n")

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._sock.makefile("rb") as lines:
            self._tasks.put(json.loads(lines.readline() or "null"))
            while lines.readline():
                self.over.set()
        end()


def end() -> NoReturn:
    """End this process now, and what it has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Do what the parent says, until that is over."""
    lifeline = Lifeline(socket.socket(fileno=int(sys.argv[1])))
    task = lifeline.task()
    sys.path[:] = task["path"]
    if task["role"] == SERVER:
        _import_less()
    (run_programs if task["role"] == WORKER else serve_variables)(lifeline, task)


def _import_less() -> None:
    """Give modules of the package a parent that imports nothing by itself."""
    package = types.ModuleType("jaxstrategy")
    package.__path__ = [str(Path(__file__).parents[3])]
    sys.modules["jaxstrategy"] = package


def serve_variables(lifeline: Lifeline, task: Task) -> None:
    """Be a parameter server, until the parent says that it is over."""
    from jaxstrategy._src.parameter_servers.peer import answers_of_server
    from jaxstrategy._src.parameter_servers.store.store import Store

    _serve(lifeline, task, answers_of_server(Store()))


def run_programs(lifeline: Lifeline, task: Task) -> None:
    """Be a worker, until the parent says that it is over."""
    import jax

    from jaxstrategy._src.errors import ParameterServerLost
    from jaxstrategy._src.parameter_servers.peer import (
        Peer,
        RemoteServer,
        answers_of_worker,
    )
    from jaxstrategy._src.parameter_servers.stream import dialled
    from jaxstrategy._src.parameter_servers.worker import WorkerEngine

    servers = []
    for number, path in enumerate(task["servers"]):
        dial = functools.partial(dialled, path)
        peer = Peer(f"Parameter server {number}", dial, ParameterServerLost)
        servers.append(RemoteServer(peer))
    engine = WorkerEngine(task["index"], servers, jax.local_devices())
    _serve(lifeline, task, answers_of_worker(engine))


def _serve(lifeline: Lifeline, task: Task, answer: Any) -> None:
    from jaxstrategy._src.parameter_servers.peer import Responder
    from jaxstrategy._src.parameter_servers.stream import Listener

    Listener(task["address"]).start(Responder(answer).add)
    lifeline.say_ready()
    lifeline.over.wait()


if __name__ == "__main__":
    main()
