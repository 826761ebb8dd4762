"""Signs of life to those who wait for an answer: `Heartbeat`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

from jaxstrategy.launch._child_process import started
from jaxstrategy.parameter_servers.wire._frame import WireFrame
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._stream import Stream

LONGEST_PATIENCE = 1e6
"""Seconds that somebody may wait for a sign of life."""

_ALIVE = WireFrame(Kind.ALIVE)
_PER_PATIENCE = 4  # signs within the time that the other end waits for one
_SHORTEST = 0.02


class _Busy:
    """A stream at whose other end somebody may wait."""

    __slots__ = ("stream", "pause", "since", "on_lost")

    def __init__(
        self, stream: Stream, pause: float, on_lost: Callable[[], None] | None
    ) -> None:
        self.stream, self.pause, self.on_lost = stream, pause, on_lost
        self.since: float | None = None


@final
class Heartbeat:
    """A thread that tells who waits for an answer that it is being worked at.

    Code that computes for long lets other threads run: JAX gives up the interpreter
    while it compiles and while programs run.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._busy: dict[int, _Busy] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(
        self,
        stream: Stream,
        patience: float,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """Know a stream, whose other end waits so many seconds for a sign.

        Args:
          on_lost: called when the other end is seen to be gone during an answer.
        """
        pause = max(patience / _PER_PATIENCE, _SHORTEST)
        with self._lock:
            if self._is_closed:
                return
            self._busy[id(stream)] = _Busy(stream, pause, on_lost)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name="jaxstrategy heartbeat", daemon=True
                )
                if not started(thread):
                    return
                self._thread = thread
            self._lock.notify()

    def remove(self, stream: Stream) -> None:
        """Forget a stream; it may be unknown."""
        with self._lock:
            self._busy.pop(id(stream), None)

    def begin(self, stream: Stream) -> None:
        """Send signs over a stream from now on, if its other end waits for some."""
        if busy := self._busy.get(id(stream)):
            busy.since = time.monotonic()

    def end(self, stream: Stream) -> None:
        """Send none over a stream."""
        if busy := self._busy.get(id(stream)):
            busy.since = None

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._is_closed = True
            self._busy.clear()
            self._lock.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._is_closed:
                    return
                pauses = [busy.pause for busy in self._busy.values()]
                self._lock.wait(min(pauses) if pauses else None)
                busy = list(self._busy.values())
            for each in busy:
                self._tell(each)

    def _tell(self, busy: _Busy) -> None:
        since, now = busy.since, time.monotonic()
        if since is None or now - since < busy.pause / 2:
            return
        try:
            busy.stream.send_if_idle(_ALIVE)
        except OSError:
            self.remove(busy.stream)
            if busy.on_lost is not None and not busy.stream.is_closed:
                busy.on_lost()
