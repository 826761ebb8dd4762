"""Processes in sessions of their own that end with the one that started them.

Ray sends this file to other machines, whose Python need not import the package for it:
functions here use the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

from jaxstrategy.launch import _guard
from jaxstrategy.launch._started_process import AbstractStartedProcess, Stream

_GUARD = Path(_guard.__file__).read_text()
_MOST = 1 << 16  # bytes of one read


@final
class HeldPort:
    """A free port of a host, which no program is given by chance until `close`.

    Who is told of it listens there all the same: like this one, servers allow that
    their address is used again (`SO_REUSEADDR`), and this one does not listen.

    Attributes:
      number: of the port.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
        )
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":  # others do not let a second one listen
            self.close()

    def close(self) -> None:
        """Give it back."""
        self._socket.close()


@final
class Guard:
    """The process of `_guard.py`, for the time that this one lives.

    A process that this one forks keeps it alive too, unless it calls `abandon`.

    Attributes:
      pid: its number.
    """

    def __init__(self) -> None:
        started = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert started.stdin is not None and started.stdout is not None
        self._input, self._output = started.stdin, started.stdout
        self.pid = int(self._output.readline())
        started.wait()  # the guard itself was a child of that
        self._lock = threading.Lock()

    def watch(self, group: int) -> None:
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}")

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        with self._output:
            self._output.read()  # to its end, which is that of the guard

    def abandon(self) -> None:
        """Give up this process's hold of it, in a fork of the one that started it."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._input.fileno())
        os.close(nowhere)

    def _tell(self, line: str) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):  # someone ended it
            self._input.write(line + "\n")
            self._input.flush()


@final
class GuardedProcess(AbstractStartedProcess):
    """A process with all that it starts, which end together and with this one.

    A session of its own makes it a group that can be killed as a whole, and keeps
    Ctrl-C of the terminal away from it: that comes through who started it. Until it is
    closed its number stays taken, so that no other group can have it.

    Args:
      command: what runs.
      environment: the whole of it.
      name: for the names of threads.
      guard: ends it when this process is gone.
      ended: called with its exit code, in a thread: minus the number of a signal.
      joined: whether it writes errors to the same stream as all else.
      descriptors: which it inherits, under the same numbers.
      folder: where it runs; None: where this process does.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        name: str,
        guard: Guard,
        ended: Callable[[int], None],
        *,
        joined: bool = False,
        descriptors: Sequence[int] = (),
        folder: str | None = None,
    ) -> None:
        self.killed = False
        self._guard = guard
        self._code: int | None = None
        self._is_closed = False
        self._closing = threading.Lock()
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if joined else subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=descriptors,
        )
        guard.watch(self._process.pid)
        self._waiter = threading.Thread(
            target=self._wait_for_end, args=(ended,), name=f"end of {name}", daemon=True
        )
        self._waiter.start()

    @property
    def pid(self) -> int:
        """Its number, which is that of its group too."""
        return self._process.pid

    def read(self, stream: Stream) -> bytes:
        source = self._process.stderr if stream else self._process.stdout
        if source is None or source.closed:
            return b""
        chunk = os.read(source.fileno(), _MOST)
        if not chunk:
            source.close()
        return chunk

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it ends within that time, by default whenever it does."""
        if self._code is None:
            self._waiter.join(seconds)
        return self._code is not None

    def send(self, number: int) -> None:
        """Send a signal to the process itself; what it started is its own affair."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        self.killed |= self._code is None
        self._kill_group()

    def close(self) -> None:
        """Wait for its end, and end what it left behind; `ended` may call this."""
        if threading.current_thread() is not self._waiter:
            self._waiter.join()
        self._kill_group()
        self._guard.forget(self._process.pid)
        with self._closing:
            self._is_closed = True
            self._process.wait()  # from here on its number may be another's

    def _wait_for_end(self, ended: Callable[[int], None]) -> None:
        if sys.platform == "linux":
            # Not `wait`, which would give its number free while the group may live.
            end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            assert end is not None
            has_exited = end.si_code == os.CLD_EXITED
            self._code = end.si_status if has_exited else -end.si_status
        else:
            self._code = self._process.wait()
        ended(self._code)

    def _kill_group(self) -> None:
        # PermissionError is how macOS says that the group has only zombies left.
        with self._closing, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._is_closed:
                os.killpg(self._process.pid, signal.SIGKILL)
