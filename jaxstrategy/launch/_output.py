"""The output of workers: each line behind its rank, the last lines kept."""

from __future__ import annotations

import collections
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO, final

from jaxstrategy.cluster.resolvers._launched import LATE

_LATE = LATE.encode()
TAIL = 20  # lines
# Gloo prints four such lines a process to the standard output, whatever
# TF_CPP_MIN_LOG_LEVEL and GLOO_LOG_LEVEL say (JAX 0.10 and 0.12).
_CHATTER = re.compile(rb"^\[Gloo\]|Expected number of connected peer ranks")
_PROGRESS_SECONDS = 1.0
_END = re.compile(rb"\r\n|\r|\n")
_LONGEST = 1 << 16  # bytes of a line that has no end yet


@final
class Screen:
    """One of the launcher's own streams, shared by the readers of all workers."""

    def __init__(self, stream: TextIO, lock: threading.Lock) -> None:
        self._stream = stream
        self._lock = lock
        self._coloured = stream.isatty() and not os.environ.get("NO_COLOR")

    def show(self, name: str, colour: int, line: bytes) -> None:
        """Write one line behind `[name]`."""
        self._write(self._prefix(name, colour) + line + b"\n")

    def say(self, text: str) -> None:
        """Write a line of the launcher's own."""
        self._write(f"jaxstrategy.launch: {text}\n".encode(errors="replace"))

    def _prefix(self, name: str, colour: int) -> bytes:
        plain = f"[{name}]"
        coloured = f"\x1b[3{1 + colour % 6}m{plain}\x1b[0m"
        return ((coloured if self._coloured else plain) + " ").encode()

    def _write(self, data: bytes) -> None:
        with self._lock:
            try:
                self._stream.buffer.write(data)
                self._stream.flush()
            except BrokenPipeError:  # as in `... | head`: the workers go on unread
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@final
class OutputThread:
    """A thread that shows what comes from one stream of one process.

    Args:
      name: of the process.
      read: gives the bytes of the stream that come next; none at its end.
      show: is given each line, without its end.
      verbose: whether lines count that only libraries find worth saying.
    """

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
            if line.startswith(_LATE):
                self.late = line.removeprefix(_LATE)
            self._show(line)


def lines(read: Callable[[], bytes]) -> Iterator[bytes]:
    """Lines without their ends.

    Args:
      read: gives the bytes that come next; none at the end.

    What a progress bar draws over (it ends in a carriage return) comes once a second.
    """
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
