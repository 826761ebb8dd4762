"""Processes that this one starts: each ends with all it started, and with this one.

`Guard` outlives this process to see to that, `GuardedProcess` is one of them,
`OutputThread` reads what it prints. Ray sends this file to other machines, whose Python
need not import the package: what is used there needs the standard library only.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, final

from jaxstrategy._src.cluster.resolvers.environment import LATE
from jaxstrategy._src.processes.exit_codes import MEANINGS

TAIL = 20
"""Lines of output that are kept."""

Stream = Literal[0, 1]
"""Of what a process prints: 0 is its standard output, 1 its standard error."""

_MOST = 1 << 16  # bytes of one read
# It is told process groups on its standard input: `+123` of a new one, `-123` of one
# that is over. The input's end means that its starter is gone, however it went. Its
# arguments are folders, which go then, too.
_GUARD = """
import os, signal, sys

def main():
    # Ray kills the children of a worker that ends (2.60), so this is no child of it.
    if os.fork():
        return
    print(os.getpid(), flush=True)
    groups = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # it has ended already
    for folder in sys.argv[1:]:
        import shutil, time
        for _ in range(50):  # one of them may still write while it dies
            shutil.rmtree(folder, ignore_errors=True)
            if not os.path.exists(folder):
                break
            time.sleep(0.1)

main()
"""
# Gloo prints four such lines a process to the standard output, whatever
# TF_CPP_MIN_LOG_LEVEL and GLOO_LOG_LEVEL say (JAX 0.10 and 0.12).
_CHATTER = re.compile(rb"^\[Gloo\]|Expected number of connected peer ranks")
_PROGRESS_SECONDS = 1.0
_END = re.compile(rb"\r\n|\r|\n")
_LONGEST = 1 << 16  # bytes of a line that has no end yet


class StartedProcess(Protocol):
    """A process, on this machine or another; any thread may call it."""

    killed: bool

    def read(self, stream: Stream) -> bytes:
        """What it prints next, waited for; empty at the end."""
        ...

    def send(self, number: int) -> None:
        """Send a signal to the process itself; what it started is its own affair."""

    def kill(self) -> None:
        """Kill what is left of the process and of all that it started."""

    def close(self) -> None:
        """Wait for its end, and end what it left behind."""


@final
class HeldPort:
    """A free port of a host, which no program is given by chance until `close`."""

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
        )
        # Servers that allow this, too, listen here all the same: this one does not.
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
    """A small process that outlives this one, and then kills the groups it watches."""

    def __init__(self, *folders: str, lock: int | None = None) -> None:
        self._file = lock  # has a lock that lasts as long as one of the two processes
        started = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
            text=True,
        )
        assert started.stdin is not None and started.stdout is not None
        self._input, self._output = started.stdin, started.stdout
        self.pid = int(self._output.readline())
        started.wait()  # the guard itself was a child of that
        self._lock = threading.Lock()

    def watch(self, group: int, is_over: bool = False) -> None:
        """Kill this group when this process ends, unless it is over before."""
        line = f"{'-' if is_over else '+'}{group}\n"
        with self._lock, contextlib.suppress(BrokenPipeError):  # someone ended it
            self._input.write(line)
            self._input.flush()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        with self._output:
            self._output.read()  # to its end, which is that of the guard
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def abandon(self) -> None:
        """Give up this process's hold of it, in a fork of the one that started it."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._input.fileno())
        os.close(nowhere)


@final
class GuardedProcess:
    """A process with all that it starts, which end together and with this one."""

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
            # A group that can be killed as a whole; Ctrl-C of the terminal comes to
            # it through who started it.
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
        self._guard.watch(self._process.pid, is_over=True)
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


@final
class OutputThread:
    """A thread that shows what comes from one stream of one process."""

    def __init__(
        self,
        name: str,
        read: Callable[[], bytes],
        show: Callable[[bytes], None],
        verbose: bool = False,
    ) -> None:
        self.tail = collections.deque[bytes](maxlen=TAIL)
        self.late: bytes | None = None  # what it said of processes that were late
        self._chunk = read
        self._show = show
        self._verbose = verbose
        self._thread = threading.Thread(
            target=self._read, name=f"output of {name}", daemon=True
        )
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait for the stream's end, not for ever: a stranger may hold it open."""
        self._thread.join(seconds)

    def _read(self) -> None:
        was_chatter = False
        for line in lines(self._chunk):
            # Its threads write at once: parts of two lines, and then two line ends.
            is_rest = was_chatter and not line
            was_chatter = is_rest or bool(_CHATTER.search(line))
            if was_chatter and not self._verbose:
                continue
            self.tail.append(line)
            if line.startswith(LATE.encode()):
                self.late = line.removeprefix(LATE.encode())
            self._show(line)


def lines(read: Callable[[], bytes]) -> Iterator[bytes]:
    """Lines without their ends."""
    rest, drawn = b"", -_PROGRESS_SECONDS
    while chunk := read():
        rest += chunk
        # A return at the end may be the first half of a line's end.
        whole = rest[:-1] if rest.endswith(b"\r") and len(rest) < _LONGEST else rest
        used = 0
        for end in _END.finditer(whole):
            line, used = whole[used : end.start()], end.end()
            if end[0] != b"\r":
                yield line
            elif line and time.monotonic() - drawn >= _PROGRESS_SECONDS:
                drawn = time.monotonic()
                yield line
        rest = rest[used:]
        if len(rest) >= _LONGEST:
            yield rest
            rest = b""
    if rest.strip(b"\r"):
        yield rest.rstrip(b"\r")


def described(code: int) -> str:
    """A return code of `subprocess` in words."""
    if code < 0:
        return f"signal {signal_name(-code)}"
    return f"exit code {code}" + (f" ({MEANINGS[code]})" if code in MEANINGS else "")


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; the number where the system has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def as_shell(code: int) -> int:
    """A return code of `subprocess` as a shell shows it: 128 + the signal's number."""
    return code if code >= 0 else 128 - code


_MEMORY = "jaxstrategy-memory-"


def memory_folder() -> tuple[str, int]:
    """A new folder in memory, and a file that locks it; both are for a `Guard`.

    Deletes those of this user that are not locked: all are gone who used them.
    """
    shared = "/dev/shm"  # files in memory, on Linux
    where = shared if os.access(shared, os.W_OK) else tempfile.gettempdir()
    for name in os.listdir(where):
        if name.startswith(_MEMORY):
            path = os.path.join(where, name)
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                found = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)
                stack.callback(os.close, found)
                if os.fstat(found).st_uid == os.getuid():
                    fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
    # Named so only once it is locked, or another one might delete it before.
    made = tempfile.mkdtemp(prefix=".jaxstrategy-", dir=where)
    lock = os.open(made, os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # not every file system has locks
        fcntl.flock(lock, fcntl.LOCK_EX)
    path = os.path.join(where, _MEMORY + made.rpartition("-")[2])
    os.rename(made, path)
    return path, lock


def started(thread: threading.Thread) -> bool:
    """Whether it was started: since Python 3.12 an ending interpreter starts none."""
    try:
        thread.start()
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise
        return False
    return True
