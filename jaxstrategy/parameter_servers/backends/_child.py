"""The program of a child: runs as a file, and imports the package when it is told to.

Its arguments are the numbers of inherited sockets, and its name for those who list
processes. A thread reads the first socket from the first moment: its end is that of the
parent, however that came, and then the child ends with all that it has started.
"""

from __future__ import annotations

import contextlib
import importlib
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

Task: TypeAlias = dict[str, Any]
"""What a child is to do, as JSON has it."""


@final
class Lifeline:
    """A child's hold on its parent, and the parent's on the child."""

    def __init__(self, sock: socket.socket, doors: list[socket.socket]) -> None:
        self.doors = doors
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
    numbers = map(int, sys.argv[1].split(","))
    sock, *doors = (socket.socket(fileno=number) for number in numbers)
    lifeline = Lifeline(sock, doors)
    task = lifeline.task()
    sys.path[:] = task["path"]
    if task["is_light"]:
        _import_less()
    module, _, function = task["entry"].partition(":")
    getattr(importlib.import_module(module), function)(lifeline, task)


def _import_less() -> None:
    """Give modules of the package a parent that imports nothing by itself."""
    package = types.ModuleType("jaxstrategy")
    package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules["jaxstrategy"] = package


if __name__ == "__main__":
    main()
