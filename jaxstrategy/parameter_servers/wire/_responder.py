"""Answers the requests of many streams: `Responder`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import numpy as np

from jaxstrategy._errors import ClusterError
from jaxstrategy.launch._child_process import started
from jaxstrategy.parameter_servers.wire import _remote_error
from jaxstrategy.parameter_servers.wire._frame import Fields, FrameError, WireFrame
from jaxstrategy.parameter_servers.wire._heartbeat import LONGEST_PATIENCE, Heartbeat
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._stream import Stream
from jaxstrategy.processes._secret import HOW_TO_MAKE_ONE, NETWORK, VARIABLE

Answer: TypeAlias = Callable[[WireFrame, Stream], WireFrame]
"""Makes the answer to a request, or raises what the other end shall raise."""


@final
class Responder:
    """Answers what comes over streams, each with a thread of its own.

    A stream that brings anything but frames is closed; the others do not notice.

    Args:
      answer: makes the answers; called by the threads of all streams.
      on_lost: called when the other end of a stream is seen to be gone while an answer
        is being made.
    """

    def __init__(
        self, answer: Answer, on_lost: Callable[[], None] | None = None
    ) -> None:
        self._answer = answer
        self._on_lost = on_lost
        self._heartbeat = Heartbeat()
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Stream] = {}
        self._is_closed = False

    def add(self, stream: Stream) -> None:
        """Answer what comes over a stream, in a thread, until that is closed."""
        thread = threading.Thread(
            target=self._run, args=(stream,), name="jaxstrategy responder", daemon=True
        )
        with self._lock:
            if self._is_closed or not started(thread):
                stream.close()
            else:
                self._threads[thread] = stream

    def serve(self, stream: Stream) -> None:
        """Answer what comes over a stream, in this thread, until that is closed."""
        try:
            while self._serve_one(stream):
                pass
        except (EOFError, OSError, FrameError):
            pass  # whoever asks is gone, or none of us
        finally:
            self._heartbeat.remove(stream)
            stream.close()

    def close(self) -> None:
        """Close all streams, and wait for what is being answered."""
        with self._lock:
            self._is_closed = True
            left = dict(self._threads)
        for stream in left.values():
            stream.close()
        for thread in left:
            if thread is not threading.current_thread():
                thread.join()
        self._heartbeat.close()

    def _run(self, stream: Stream) -> None:
        try:
            self.serve(stream)
        finally:
            with self._lock:
                self._threads.pop(threading.current_thread(), None)

    def _serve_one(self, stream: Stream) -> bool:
        """Answer one request; whether another may come."""
        request = stream.receive()
        if request.kind == Kind.PATIENCE:
            self._heartbeat.add(stream, _patience(request), self._on_lost)
            return True
        if request.kind == Kind.PING:
            stream.send(done())
            return True
        self._heartbeat.begin(stream)
        try:
            answer = self._answered(request, stream)
        finally:
            self._heartbeat.end(stream)
        self._send(stream, answer)
        return not stream.is_closed

    def _answered(self, request: WireFrame, stream: Stream) -> WireFrame:
        try:
            return self._answer(request, stream)
        except Exception as error:
            return _remote_error.failed(error, stream.is_trusted)
        except SystemExit as error:
            # Code that was sent here ends nothing but itself.
            return _remote_error.failed(error, may_pickle=False)

    def _send(self, stream: Stream, answer: WireFrame) -> None:
        try:
            stream.send(answer)
        except (FrameError, TypeError) as error:  # nothing of it was sent
            stream.send(_remote_error.failed(error, stream.is_trusted))


def done(fields: Fields = None, arrays: Sequence[np.ndarray] = ()) -> WireFrame:
    """The answer that a request was fulfilled."""
    return WireFrame(Kind.DONE, fields, b"", arrays)


def check_trusted(stream: Stream, what: str) -> None:
    """Nothing if the other end of a stream is known to be of the job.

    Raises:
      ClusterError: it need not be.
    """
    if not stream.is_trusted:
        raise ClusterError(
            f"{what}, and who has sent this has not proved to be of the job: the job "
            f"has no secret. Set {VARIABLE} to the same random word for all processes "
            f"({HOW_TO_MAKE_ONE} makes one), or {NETWORK}=trusted where nobody else "
            "can connect, other users of this host included."
        )


def _patience(request: WireFrame) -> float:
    seconds = request.fields
    if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_PATIENCE:
        raise FrameError(f"a patience of {seconds!r} seconds")
    return float(seconds)
