"""Worker processes, each in a session of its own, and their end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, final

from jaxstrategy.launch import _guard
from jaxstrategy.launch._output import TAIL, OutputThread, Screen

_DRAIN_SECONDS = 2.0


@final
@dataclasses.dataclass(frozen=True)
class Ended:
    """A worker is over."""

    rank: int
    code: int  # as `subprocess` gives it: minus the signal's number


@final
@dataclasses.dataclass(frozen=True)
class Asked:
    """The launcher was sent a signal."""

    signal: int


Events = queue.SimpleQueue[Ended | Asked]  # its `put` may be called by signal handlers


@final
class Guard:
    """The process of `_guard.py`, for the time that the launcher lives."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(_guard.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}")

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._process.wait()

    @property
    def _input(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # someone ended the guard
            self._input.write(line + "\n")
            self._input.flush()


@final
class Worker:
    """One process of the job. Its end comes as an event."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        screens: tuple[Screen, Screen],
        events: Events,
        guard: Guard,
        verbose: bool,
    ) -> None:
        self.rank = rank
        self.killed = False
        self._guard = guard
        # A session of its own makes it a group that can be killed as a whole, and
        # keeps Ctrl-C of the terminal away from it: it comes through the launcher.
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        guard.watch(self._process.pid)
        self._readers = [
            OutputThread(rank, source, screen, verbose)
            for source, screen in zip(
                (self._process.stdout, self._process.stderr), screens, strict=True
            )
            if source is not None
        ]
        self._waiter = threading.Thread(
            target=lambda: events.put(Ended(rank, self._process.wait())),
            name=f"end of rank {rank}",
            daemon=True,
        )
        self._waiter.start()

    @property
    def tail(self) -> tuple[bytes, ...]:
        """The last lines that it printed, those of its errors at the end.

        Which line of one stream came before which of the other is not known.
        """
        return tuple(line for reader in self._readers for line in reader.tail)[-TAIL:]

    @property
    def late(self) -> str | None:
        """The line that it printed about late processes, None if it printed none."""
        told = [reader.late for reader in self._readers if reader.late is not None]
        return told[-1].decode(errors="replace") if told else None

    def send(self, number: int) -> None:
        """Send a signal to the process itself; what it started is its own affair."""
        if self._waiter.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        self.killed |= self._waiter.is_alive()
        self._kill_group()

    def close(self) -> None:
        """End what it left behind and show the rest of its output."""
        self._waiter.join()
        self._kill_group()
        self._guard.forget(self._process.pid)
        for reader in self._readers:
            reader.finish(_DRAIN_SECONDS)

    def _kill_group(self) -> None:
        # PermissionError is how macOS says that the group has only zombies left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
