"""Another process that answers requests: `Peer`."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import final

from jaxstrategy.parameter_servers.wire import _remote_error
from jaxstrategy.parameter_servers.wire._frame import FrameError, WireFrame
from jaxstrategy.parameter_servers.wire._heartbeat import LONGEST_PATIENCE
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._stream import Stream

PATIENCE = 10.0
"""Seconds without a sign of life, after which a process is lost."""

_LINES = 20  # of a lost process's output


@final
class Peer:
    """Another process, of which any number of threads may ask something at once.

    Each request has a stream for itself, which is used again: as many are made as
    threads ask at the same time.

    Args:
      name: what the other process is, such as "Worker 3".
      dial: makes a stream to it.
      lost: the class of the error when it is gone.
      patience: seconds without a sign of life, after which it is lost.
      last_output: what it wrote last, for the error.

    Raises:
      ValueError: the patience is no number of seconds.
    """

    def __init__(
        self,
        name: str,
        dial: Callable[[], Stream],
        lost: type[Exception],
        patience: float = PATIENCE,
        last_output: Callable[[], str | None] | None = None,
    ) -> None:
        if not 0 < patience <= LONGEST_PATIENCE:
            raise ValueError(
                f"The patience was {patience!r}; seconds from 0 to "
                f"{LONGEST_PATIENCE:g} were wanted, 0 excluded."
            )
        self._name = name
        self._dial = dial
        self._lost = lost
        self._patience = patience
        self._last_output = last_output
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Stream] = []
        self._all: set[Stream] = set()
        self._why: str | None = None
        weakref.finalize(self, _close, self._all)

    def ask(self, request: WireFrame, seconds: float | None = None) -> WireFrame:
        """The answer to a request.

        Args:
          seconds: the time for an answer, whatever signs of life come; None: any.

        Raises:
          FrameError, TypeError: the request cannot be sent.
          TimeoutError: no answer came in that time.
          Exception: that of `lost`, when the other process is gone; otherwise what was
            raised there.
        """
        end = None if seconds is None else time.monotonic() + seconds
        stream = self._taken()
        answer = self._exchanged(stream, request, self._patience, end)
        if answer.kind == Kind.FAILED:
            raise _remote_error.raised_by(answer, self._name, stream.is_trusted)
        return answer

    def wait_until_up(self, seconds: float) -> None:
        """Wait for a process that has only been started, up to so many seconds.

        Raises:
          Exception: that of `lost`; the process has ended, or says nothing for so long.
        """
        self._exchanged(self._taken(), WireFrame(Kind.PING), seconds)

    def close(self, why: str = "its connections were closed here") -> None:
        """Close all streams; who waits for an answer gets the error of a lost one."""
        with self._lock:
            self._why = self._why or why
            streams = set(self._all)
            self._all.clear()
            self._idle.clear()
        _close(streams)

    def _exchanged(
        self,
        stream: Stream,
        request: WireFrame,
        patience: float,
        end: float | None = None,
    ) -> WireFrame:
        is_whole = False
        try:
            answer = self._asked(stream, request, patience, end)
            is_whole = True
        except (FrameError, TypeError):
            is_whole = True  # nothing was sent
            raise
        except _LateError:
            raise TimeoutError(f"{self._name} did not answer in time.") from None
        except (EOFError, OSError) as error:
            raise self._losing(_reason(error, patience)) from error
        finally:
            # Whatever else ends it, such as Ctrl-C, leaves half a message behind.
            self._put_back(stream, is_whole)
        return answer

    def _asked(
        self, stream: Stream, request: WireFrame, patience: float, end: float | None
    ) -> WireFrame:
        is_usual = patience == self._patience and end is None
        if not is_usual:
            stream.limit_silence(patience)
        stream.send(request)
        while (answer := _received(stream, patience, end)).kind == Kind.ALIVE:
            pass
        if answer.kind not in (Kind.DONE, Kind.FAILED):
            raise ConnectionError(f"it answered with a message {answer.kind}")
        if not is_usual:
            stream.limit_silence(self._patience)
        return answer

    def _taken(self) -> Stream:
        if os.getpid() != self._process:
            raise self._lost(
                f"{self._name} was connected to a process of which this one is a fork, "
                "and must not be asked by both. Start processes by spawn, or make the "
                "strategy in this one."
            )
        with self._lock:
            why = self._why
            if why is None and self._idle:
                return self._idle.pop()
        if why is not None:
            raise self._error(why)
        stream = self._dialled()
        with self._lock:
            why = self._why
            if why is None:
                self._all.add(stream)
                return stream
        stream.close()
        raise self._error(why)

    def _dialled(self) -> Stream:
        try:
            stream = self._dial()
        except (EOFError, OSError) as error:
            raise self._losing(f"it cannot be reached ({error})") from error
        try:
            stream.limit_silence(self._patience)
            stream.send(WireFrame(Kind.PATIENCE, self._patience))
        except OSError as error:
            stream.close()
            raise self._losing(_reason(error, self._patience)) from error
        except BaseException:
            stream.close()
            raise
        return stream

    def _put_back(self, stream: Stream, is_whole: bool) -> None:
        with self._lock:
            if is_whole and stream in self._all:
                self._idle.append(stream)
                return
            self._all.discard(stream)
        stream.close()

    def _losing(self, why: str) -> Exception:
        """The error of a process that is lost from now on."""
        self.close(why)
        assert self._why is not None
        return self._error(self._why)

    def _error(self, why: str) -> Exception:
        # Without the lock, because `last_output` may wait for the process to end.
        text = f"{self._name} is lost: {why}."
        output = self._last_output() if self._last_output is not None else None
        if output and output.strip():
            lines = output.strip().splitlines()[-_LINES:]
            text += "\n".join(["\nThe last that it wrote:", *lines])
        return self._lost(text)


def dial_of(streams: Iterable[Stream]) -> Callable[[], Stream]:
    """A `dial` that hands out streams that exist already.

    Raises:
      ConnectionError: as the result is called, when all are handed out.
    """
    left = list(streams)

    def dial() -> Stream:
        try:
            return left.pop(0)
        except IndexError:
            raise ConnectionError("all connections to it are in use") from None

    return dial


def _close(streams: set[Stream]) -> None:
    for stream in streams:
        stream.close()


class _LateError(Exception):
    """The time for an answer is over, and the other process lives."""


def _received(stream: Stream, patience: float, end: float | None) -> WireFrame:
    try:
        if end is None:
            return stream.receive()
        left = end - time.monotonic()
        if left <= 0:
            raise _LateError
        stream.limit_silence(min(left, patience))
        try:
            return stream.receive()
        except TimeoutError:
            if left <= patience:
                raise _LateError from None
            raise
    except FrameError as error:
        raise ConnectionError(str(error)) from error


def _reason(error: Exception, patience: float) -> str:
    match error:
        case TimeoutError():
            return f"it gave no sign of life for {patience:g} s"
        case EOFError() | ConnectionError():
            return f"it ended, or closed the connection ({error})"
        case _:
            return f"the connection broke ({error})"
