"""One coordinator at a time, the newest: `SessionHost`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, final

from jaxstrategy._errors import ClusterError
from jaxstrategy.parameter_servers.backends._cluster_session import Hello
from jaxstrategy.parameter_servers.wire import _peer
from jaxstrategy.parameter_servers.wire._peer import Answer, Responder, done
from jaxstrategy.parameter_servers.wire._stream import FrameError, Stream, WireFrame

_SECONDS = 10.0  # for the first word of who has proved to be of the job


@final
class SessionHost:
    """Answers connections for the newest coordinator, and for no earlier one."""

    def __init__(
        self,
        begin: Callable[[Hello], Answer],
        told: Callable[[], Mapping[str, Any]],
        is_kept: bool,
        say: Callable[[str], None],
    ) -> None:
        self._begin = begin
        self._told = told
        self._is_kept = is_kept
        self._say = say
        self._lock = threading.Lock()
        self._coordinator = ""
        self._past: set[str] = set()
        self._begun: dict[tuple[str, str], _Begun] = {}

    def take(self, stream: Stream) -> None:
        """Serve a connection, in a thread of its own."""
        threading.Thread(
            target=self._serve, args=(stream,), name="session", daemon=True
        ).start()

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            dropped, self._begun = self._begun, {}
        _close_all(dropped)

    def _serve(self, stream: Stream) -> None:
        try:
            hello = _received(stream)
            begun = self._answered(stream, hello)
        except (EOFError, OSError, FrameError):
            stream.close()
            return
        if begun is None:
            stream.close()
            return
        begun.responder.serve(stream)
        self._left(hello, begun, stream)

    def _answered(self, stream: Stream, hello: Hello) -> _Begun | None:
        if hello.wants in ("devices", "end"):
            if hello.wants == "end":
                self._end(hello)
            stream.send(done(self._told()))
            return None
        try:
            begun = self._found(hello, stream)
        except ClusterError as error:
            stream.send(_peer.failed(error, may_pickle=False))
            return None
        stream.send(done(self._told()))
        return begun

    def _found(self, hello: Hello, stream: Stream) -> _Begun:
        dropped: dict[tuple[str, str], _Begun] = {}
        with self._lock:
            if hello.coordinator in self._past:
                raise ClusterError("it works for another coordinator, which came later")
            if hello.wants == "begin" and hello.coordinator != self._coordinator:
                dropped, self._begun = self._begun, {}
                if self._coordinator:
                    self._past.add(self._coordinator)
                self._coordinator = hello.coordinator
                self._say("a new coordinator has come")
            begun = self._begun.get(hello.key)
            if begun is None or hello.coordinator != self._coordinator:
                if hello.wants != "begin":
                    raise ClusterError(
                        "it was started anew and has nothing of what was there before"
                    )
                begun = self._begun[hello.key] = _Begun(self._begin(hello))
            begun.streams.add(stream)
        _close_all(dropped)
        return begun

    def _end(self, hello: Hello) -> None:
        with self._lock:
            is_there = hello.coordinator == self._coordinator
            begun = self._begun.pop(hello.key, None) if is_there else None
        if begun is not None:
            begun.close()

    def _left(self, hello: Hello, begun: _Begun, stream: Stream) -> None:
        with self._lock:
            begun.streams.discard(stream)
            is_over = not begun.streams and not self._is_kept
            if is_over and self._begun.get(hello.key) is begun:
                del self._begun[hello.key]
        if is_over:
            begun.close()


@final
class _Begun:
    """Something that was begun, and the connections for it."""

    def __init__(self, answer: Answer) -> None:
        self.responder = Responder(answer)
        self.streams: set[Stream] = set()

    def close(self) -> None:
        for stream in tuple(self.streams):
            stream.close()
        self.responder.close()


def _close_all(dropped: Mapping[tuple[str, str], _Begun]) -> None:
    for begun in dropped.values():
        begun.close()


def _received(stream: Stream) -> Hello:
    stream.limit_silence(_SECONDS)
    frame: WireFrame = stream.receive()
    stream.limit_silence(None)
    hello = Hello.of(frame)
    if hello is None:
        raise FrameError(f"a frame of the kind {frame.kind} before any hello")
    return hello
