"""Worker processes of a job, their output, and their end as an event."""

from __future__ import annotations

import dataclasses
import functools
import queue
from typing import final

from jaxstrategy.launch._output import TAIL, OutputThread, Screen
from jaxstrategy.launch._started_process import AbstractStartedProcess, Stream

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
class Worker:
    """One process of the job, and what it prints.

    Args:
      rank: its number.
      process: itself.
      screens: for what it prints, and for its errors.
      verbose: whether to show lines that only libraries find worth saying.
      name: what stands before its lines; its rank, if nothing else is said.
    """

    def __init__(
        self,
        rank: int,
        process: AbstractStartedProcess,
        screens: tuple[Screen, Screen],
        verbose: bool,
        name: str | None = None,
    ) -> None:
        self.rank = rank
        shown = str(rank) if name is None else name
        self._process = process
        streams: tuple[Stream, Stream] = (0, 1)
        self._readers = [
            OutputThread(
                f"rank {shown}",
                functools.partial(process.read, stream),
                functools.partial(screen.show, shown, rank),
                verbose,
            )
            for stream, screen in zip(streams, screens, strict=True)
        ]

    @property
    def killed(self) -> bool:
        """Whether `kill` came before its end."""
        return self._process.killed

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
        self._process.send(number)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        self._process.kill()

    def close(self) -> None:
        """End what it left behind and show the rest of its output."""
        self._process.close()
        for reader in self._readers:
            reader.finish(_DRAIN_SECONDS)
