"""A child process with its control line: `ChildProcess`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import final

from jaxstrategy.launch._child_process import (
    Guard,
    GuardedProcess,
    OutputThread,
    described,
)
from jaxstrategy.parameter_servers.backends import _child
from jaxstrategy.parameter_servers.backends._child import Task
from jaxstrategy.parameter_servers.wire._stream import Door, Stream

START_SECONDS = 60.0
"""An import of JAX takes one, on a busy host many."""

_DRAIN_SECONDS = 1.0


@final
class ChildProcess:
    """A process that ends with this one, and answers over its sockets."""

    def __init__(
        self,
        name: str,
        task: Task,
        environment: Mapping[str, str],
        guard: Guard,
        ended: Callable[[ChildProcess], None],
        servers: Sequence[socket.socket] = (),
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.name = name
        self._start_seconds = start_seconds
        self._code: int | None = None
        self._told: list[Callable[[str], None]] = []
        self._ready = threading.Event()  # or ended
        self._over = threading.Event()
        self._building = threading.Lock()
        self._line, line = socket.socketpair()
        own, door = socket.socketpair()
        self._door = Door(own)
        with self._building, line, door:
            numbers = [each.fileno() for each in (line, door, *servers)]
            self._process = GuardedProcess(
                # -P: the folder of the program is none to import from.
                [
                    sys.executable,
                    "-P",
                    _child.__file__,
                    ",".join(map(str, numbers)),
                    name,
                ],
                environment,
                name,
                guard,
                lambda code: self._end(code, ended),
                joined=True,
                descriptors=numbers,
            )
            read = functools.partial(self._process.read, 0)
            self._output = OutputThread(name, read, functools.partial(show, name))
        path = [os.path.abspath(entry) for entry in sys.path]
        self._tell({"path": path, **task})
        threading.Thread(
            target=self._listen, name=f"control of {name}", daemon=True
        ).start()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def is_ready(self, seconds: float | None = None) -> bool:
        """Whether it answers calls, within that time, or the time to start."""
        seconds = self._start_seconds if seconds is None else seconds
        self._ready.wait(seconds)
        return self._ready.is_set() and self.end is None

    def dial(self) -> Stream:
        """A new connection to it, once it answers."""
        if not self.is_ready():
            raise ConnectionError(
                self.end or f"it did not start within {self._start_seconds:g} s"
            )
        return self._door.dial()

    def door(self) -> socket.socket:
        """The socket of a door to it; of one that nobody attends if it has ended."""
        try:
            return self._door.another()
        except OSError:
            one, other = socket.socketpair()
            other.close()
            return one

    @property
    def end(self) -> str | None:
        """How it has ended, in words; None while it has not."""
        if self._code is None:
            return None
        return f"it ended with {described(self._code)}"

    def when_ended(self, tell: Callable[[str], None]) -> None:
        """Tell how it has ended, once it has."""
        with self._building:
            if self.end is None:
                self._told.append(tell)
                return
        tell(self.end)

    def last_output(self) -> str:
        """The last lines that it wrote, and how it has ended if it has."""
        # Its sockets break before it is over, and its output comes after that.
        if self._over.wait(_DRAIN_SECONDS):
            self._output.finish(_DRAIN_SECONDS)
        lines = [line.decode(errors="replace") for line in self._output.tail]
        lines += [f"({self.end})"] if self.end else []
        return "\n".join(lines)

    def ask_to_end(self) -> None:
        """Let it end by itself."""
        self._tell(None)

    def wait(self, seconds: float) -> bool:
        """Whether it ends within that time."""
        return self._process.wait(seconds)

    def send(self, number: int) -> None:
        """Send it a signal."""
        self._process.send(number)

    def kill(self) -> None:
        """End it now, and what it has started."""
        self._process.kill()

    def abandon(self) -> None:
        """Let go of it, in a fork of this process."""
        if self._line.fileno() >= 0:
            os.close(self._line.detach())  # `close` would wait for the reader's file
        self._door.close()

    def close(self) -> None:
        """Wait for its end, and for what it has written."""
        self._process.close()
        self._output.finish(_DRAIN_SECONDS)

    def _tell(self, task: Task | None) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            self._line.sendall(json.dumps(task).encode() + b"\n")

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._line.makefile("rb") as lines:
            while lines.readline():
                self._ready.set()

    def _end(self, code: int, ended: Callable[[ChildProcess], None]) -> None:
        with self._building:  # some end at once
            self._code = code
        self._over.set()
        self._ready.set()
        self._process.close()
        self._hang_up()
        ended(self)
        for tell in self._told:
            tell(f"it ended with {described(code)}")

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # wakes up who reads it
        self._line.close()
        self._door.close()


def show(name: str, line: bytes) -> None:
    """Show a line that a process wrote, behind its name."""
    stream = sys.stderr
    # Notebooks have streams of their own, and some programs have none.
    with contextlib.suppress(AttributeError, ValueError, OSError):
        stream.write(f"[{name}] {line.decode(errors='replace')}\n")
        stream.flush()
