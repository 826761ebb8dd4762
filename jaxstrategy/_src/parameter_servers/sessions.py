"""Sessions of a coordinator with workers and servers: who begins one, and who answers.

A session is one strategy's, with a server or with one life of a worker. Any number of
connections belong to it. A task works for the newest coordinator, and for no other one.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, final

from jaxstrategy._src.errors import ClusterError, ParameterServerLost
from jaxstrategy._src.parameter_servers import peer as _peer
from jaxstrategy._src.parameter_servers.peer import (
    Answer,
    Peer,
    RemoteServer,
)
from jaxstrategy._src.parameter_servers.stream import (
    SECONDS,
    FrameError,
    Listener,
    Stream,
    dialled,
)
from jaxstrategy._src.processes.secret import Secret

COORDINATOR = secrets.token_hex(16)
"""The name of this process as a coordinator; another one has another name."""
Wish: TypeAlias = Literal["begin", "join", "end", "devices"]


@final
@dataclasses.dataclass(frozen=True)
class Hello:
    """Who calls a worker or parameter server, and for what.

    Attributes:
      wants: "begin" something with this name; "join" it, as another connection; "end"
        it; or only to know which "devices" there are.
      coordinator: the name of its process.
      strategy: the name of one strategy of it.
      life: of a worker, the name of one life; empty for a server.
      index: of the worker.
      servers: the addresses of all parameter servers, for a worker.
    """

    wants: Wish
    coordinator: str
    strategy: str
    life: str = ""
    index: int = 0
    servers: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The name of the session, within one coordinator."""
        return self.strategy, self.life


def joined(
    address: str, secret: Secret | None, hello: Hello, seconds: float = SECONDS
) -> tuple[Stream, Mapping[str, Any]]:
    """A stream to a task of a cluster, and what it says of itself."""
    refused = ConnectionRefusedError, FileNotFoundError
    try:
        stream = dialled(address, secret, seconds)
    except OSError as error:
        if isinstance(error, refused) or isinstance(error.__cause__, refused):
            raise ConnectionRefusedError(f"nobody listens at {address}") from error
        raise ConnectionError(str(error)) from error
    try:
        stream.limit_silence(seconds)
        stream.send(hello)
        answer = stream.receive()
        stream.limit_silence(None)
        why = _peer.raised_by(answer, address)
    except (EOFError, OSError, FrameError) as error:
        stream.close()
        raise ConnectionError(f"{address} does not answer ({error})") from error
    if why is not None:
        stream.close()
        raise ConnectionAbortedError(str(why))
    return stream, answer[1]


def remote_server(
    name: str,
    address: str,
    secret: Secret | None,
    hello: Hello,
    patience: float = _peer.PATIENCE,
    last_output: Callable[[], str | None] | None = None,
) -> RemoteServer:
    """A parameter server, with which the session of `hello` has begun."""

    joining = Hello("join", hello.coordinator, hello.strategy)

    def dial(seconds: float) -> Stream:
        return joined(address, secret, joining, seconds)[0]

    # On this host connections break with their processes only.
    reconnects = secret is not None
    lost = ParameterServerLost
    return RemoteServer(
        Peer(name, dial, lost, patience, last_output, reconnects=reconnects)
    )


@final
class SessionHost:
    """Answers connections for the newest coordinator, and for no earlier one.

    Args:
      begin: makes what a session is with.
      told: what the task says of itself.
      is_kept: whether that stays when all connections are gone.
      say: tells people.
    """

    def __init__(
        self,
        begin: Callable[[Hello], Answer],
        told: Callable[[], Mapping[str, Any]],
        is_kept: bool,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._begin = begin
        self._told = told
        self._is_kept = is_kept
        self._say = say
        self._lock = threading.Lock()
        self._coordinator = ""
        self._past: set[str] = set()
        self._begun: dict[tuple[str, str], _Begun] = {}
        self._listener: Listener | None = None

    def listen(self, address: str, secret: Secret | None = None) -> None:
        """Serve those who connect, in threads."""

        self._listener = Listener(address, secret)
        self._listener.start(self._serve)

    def close(self) -> None:
        """Listen no more, and drop everything."""
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            dropped, self._begun = self._begun, {}
        for begun in dropped.values():
            begun.close()

    def _serve(self, stream: Stream) -> None:
        try:
            stream.limit_silence(SECONDS)
            hello = stream.receive()
            stream.limit_silence(None)
            if not isinstance(hello, Hello):
                raise FrameError(f"{hello!r} before any hello")
            begun = self._answered(stream, hello)
        except (EOFError, OSError, FrameError):
            stream.close()
            return
        if begun is None:
            stream.close()
            return
        _peer.serve(stream, begun.answer)
        with self._lock:
            begun.streams.discard(stream)
            is_over = not (begun.streams or self._is_kept)
            if is_over and self._begun.get(hello.key) is begun:
                del self._begun[hello.key]
        if is_over:
            begun.close()

    def _answered(self, stream: Stream, hello: Hello) -> _Begun | None:
        """What a connection is for; None if all is said."""
        begun: _Begun | None = None
        if hello.wants == "end":
            self._end(hello)
        elif hello.wants != "devices":
            try:
                begun = self._found(hello, stream)
            except ClusterError as error:
                stream.send_packed(_peer.failed(error))
                return None
        stream.send(("done", self._told()))
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
        for each in dropped.values():
            each.close()
        return begun

    def _end(self, hello: Hello) -> None:
        with self._lock:
            is_there = hello.coordinator == self._coordinator
            begun = self._begun.pop(hello.key, None) if is_there else None
        if begun is not None:
            begun.close()


@final
class _Begun:
    """Something that was begun, and the connections for it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.streams: set[Stream] = set()

    def close(self) -> None:
        for stream in tuple(self.streams):
            stream.close()
