"""Servers and workers in other processes: who asks over streams, and who answers.

A request is a tuple of the name of a method and its arguments; its answer is
`("done", value)`, or `("failed", ...)` with what the method raised. Who waits for long
tries another connection meanwhile, so that a process that hangs is not waited for.

A session is one strategy's, with a server or with one life of a worker. Any number of
connections belong to it. A task works for the newest coordinator, and for no other one.
"""

from __future__ import annotations

import functools
import os
import pickle
import secrets
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

import numpy as np

from jaxstrategy._src.errors import ClusterError, MissingExtraError, ParameterServerLost
from jaxstrategy._src.parameter_servers.protocol import (
    SERVER_METHODS,
    WORKER_METHODS,
    CallNumber,
    ServerOperation,
)
from jaxstrategy._src.parameter_servers.stream import (
    SECONDS,
    FrameError,
    Listener,
    Packed,
    Stream,
    dialled,
    packed,
)
from jaxstrategy._src.processes.secret import Secret

# Objects of the user's, and what his code raises.


class Dumped(NamedTuple):
    """An object that only its receiver's code may load, with large buffers apart."""

    blob: bytes
    arrays: list[np.ndarray]

    def loaded(self) -> Any:
        """The object again. This runs whatever its sender wants to be run."""
        return pickle.loads(self.blob, buffers=self.arrays)


def dumped(value: object) -> Dumped:
    """An object, with the code of functions and classes that others cannot import."""
    try:
        import cloudpickle
    except ImportError:
        raise MissingExtraError(
            "Functions and datasets are sent to workers in other processes by "
            "cloudpickle, which is not installed: pip install "
            "'jaxstrategy[coordinator]'"
        ) from None
    buffers: list[pickle.PickleBuffer] = []
    blob = cloudpickle.dumps(value, 5, buffers.append)
    return Dumped(blob, [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers])


_LONGEST = 1 << 16  # characters of a message or a traceback


class _Failure(NamedTuple):
    """What a request raised."""

    shown: str  # where it cannot be unpickled
    trace: str
    error: bytes

    def raised(self, where: str) -> Exception:
        """The exception, with the traceback of the other process."""
        error: object = None
        try:
            error = pickle.loads(self.error)
        except Exception:  # such as a module that only the other process can import
            pass
        if not isinstance(error, Exception):
            error = RuntimeError(self.shown)
        error.add_note(f"Traceback of {where}:\n{self.trace}")
        return error


def _failed(error: BaseException) -> Packed:
    """The answer that a request failed."""
    trace = "".join(traceback.format_exception(error))[-_LONGEST:]
    name, message = type(error).__name__, _shown(error)[:_LONGEST]
    shown = f"{name}: {message}" if message else name
    return packed(("failed", _Failure(shown, trace, _faithful(error))))


def _raised_by(answer: Any, where: str) -> Exception | None:
    """What an answer says that a request has raised; None if it was fulfilled."""
    match answer:
        case ("done", _):
            return None
        case ("failed", _Failure() as failure):
            return failure.raised(where)
    raise ConnectionError(f"it answered with {str(answer)[:40]!r}")


def _faithful(error: BaseException) -> bytes:
    """The exception pickled such that it comes out the same; nothing if it cannot."""
    if not isinstance(error, Exception):
        return b""
    # The second for those whose `__init__` takes other arguments than `args`.
    for form in (error, _Parts(error)):
        try:
            try:
                blob = dumped(form).blob
            except MissingExtraError:
                blob = pickle.dumps(form, 5)
            again = pickle.loads(blob)
        except Exception:  # of the user's class, whatever it raises
            continue
        if type(again) is type(error) and _shown(again) == _shown(error):
            return blob
    return b""


class _Parts:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_parts, (type(self._error), self._error.args, vars(self._error))


def _of_parts(
    cls: type[Exception], args: tuple[Any, ...], state: dict[str, Any]
) -> Exception:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


def _shown(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as why:  # of the user's `__str__`
        return f"(its `__str__` raised {type(why).__name__})"


# Who asks.

PATIENCE = 10.0
"""Seconds without a sign of life, after which a process is lost."""
LONGEST_PATIENCE = 1e6
_LINES = 20  # of a lost process's output
_RECONNECT_SECONDS = 20.0  # how long a server may be out of reach before it is lost
_RECONNECT_PAUSE = 0.2
_MOST_REPEATS = 3  # of one request; it may be what breaks the connection


@final
class Peer:
    """Another process; any number of threads may send it requests at once.

    Args:
      name: of it, for people.
      dial: makes a new connection, within so many seconds.
      lost: the class of the error when it is gone.
      patience: seconds without a sign of life, after which it is.
      last_output: what it wrote last, if that is known.
      first: a connection.
      reconnects: whether it is reached again when the network broke, as long as it
        still has all; each request counts once.
    """

    def __init__(
        self,
        name: str,
        dial: Callable[[float], Stream],
        lost: type[Exception],
        patience: float = PATIENCE,
        last_output: Callable[[], str | None] = lambda: None,
        first: Stream | None = None,
        reconnects: bool = False,
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
        self._most_repeats = _MOST_REPEATS if reconnects else 0
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._reconnecting = threading.Lock()
        self._is_closed = False
        self._idle: list[Stream] = []
        self._all: set[Stream] = set()
        self._why: str | None = None  # it is lost
        weakref.finalize(self, _close, self._all)
        if first is not None:
            self._add(first)
            self._idle.append(first)

    def ask(self, method: str, *arguments: Any) -> Any:
        """The answer to a request."""
        for repeats in range(self._most_repeats + 1):
            try:
                if repeats and method == "create":
                    self._asked("drop", arguments[:1])  # it may be there already
                return self._asked(method, *arguments)
            except self._lost as lost:
                if repeats == self._most_repeats:
                    raise
                self._connect_again(lost)
                if method == "push" and not _counts_once(*arguments):
                    raise self._lost(
                        f"{lost} It was reached again, but whether the change that "
                        "was being made counts is not known."
                    ) from lost
        raise AssertionError  # the last one returns or raises

    def close(self, why: str = "its connections were closed here") -> None:
        """Close all streams; who waits for an answer gets the error of a lost one."""
        self._is_closed = True
        self._drop(why)

    def _asked(self, method: str, *arguments: object) -> Any:
        message = packed((method, *arguments))
        stream = self._taken()
        is_whole = False
        try:
            stream.send_packed(message)
            while stream.is_silent():
                try:  # whether the process answers another connection
                    # A quarter of the time has gone.
                    self._dial(0.75 * self._patience).close()
                except (EOFError, OSError) as error:
                    raise TimeoutError from error
            answer = stream.receive()
            failure = _raised_by(answer, self._name)
            is_whole = True
        except (EOFError, OSError, FrameError) as error:
            why = _reason(error, self._patience)
            # Else it was reached again meanwhile, over others.
            if stream in self._all:
                self._drop(why)
            raise self._error(self._why or why) from error
        finally:
            # Whatever else ends it, such as Ctrl-C, leaves half a message behind.
            with self._lock:
                if is_kept := is_whole and stream in self._all:
                    self._idle.append(stream)
                else:
                    self._all.discard(stream)
            if not is_kept:
                stream.close()
        if failure is not None:
            raise failure
        return answer[1]

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
        try:
            stream = self._dial(SECONDS)
        except (EOFError, OSError) as error:
            self._drop(why := f"it cannot be reached ({error})")
            raise self._error(self._why or why) from error
        if (why := self._add(stream)) is not None:
            stream.close()
            raise self._error(why)
        return stream

    def _add(self, stream: Stream) -> str | None:
        """Have a connection more, unless it is lost: why that is."""
        stream.limit_silence(self._patience)
        with self._lock:
            if self._why is None:
                self._all.add(stream)
            return self._why

    def _connect_again(self, lost: Exception) -> None:
        """Reach the process over new connections."""
        with self._reconnecting:  # the first that finds it lost connects for all
            end = time.monotonic() + _RECONNECT_SECONDS
            while self._why is not None:
                if self._is_closed or time.monotonic() >= end:
                    raise lost
                try:
                    stream = self._dial(SECONDS)
                except (ConnectionAbortedError, ConnectionRefusedError) as error:
                    raise self._error(str(error)) from lost
                except ConnectionError:
                    time.sleep(_RECONNECT_PAUSE)
                    continue
                stream.limit_silence(self._patience)
                with self._lock:
                    self._all.add(stream)
                    self._idle.append(stream)
                    self._why = None
                if self._is_closed:  # just now
                    self._drop(str(lost))

    def _drop(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why
            streams = set(self._all)
            self._all.clear()
            self._idle.clear()
        _close(streams)

    def _error(self, why: str) -> Exception:
        # Without the lock, because `last_output` may wait for the process to end.
        text = f"{self._name} is lost: {why}."
        if output := (self._last_output() or "").strip():
            lines = output.splitlines()[-_LINES:]
            text += "\n".join(["\nThe last that it wrote:", *lines])
        return self._lost(text)


def _close(streams: set[Stream]) -> None:
    for stream in streams:
        stream.close()


def _reason(error: Exception, patience: float) -> str:
    match error:
        case TimeoutError():
            return f"it gave no sign of life for {patience:g} s"
        case EOFError() | ConnectionError() | FrameError():
            return f"it ended, or closed the connection ({error})"
        case _:
            return f"the connection broke ({error})"


def _counts_once(
    operations: Sequence[ServerOperation], call: CallNumber | None = None
) -> bool:
    """Whether a push that is made twice changes what it does once."""
    return call is not None or all(each.name == "set" for each in operations)


class RemoteServer:
    """A parameter server in another process, whose methods are requests to it.

    Attributes:
      peer: the process, to be replaced when another one is started for it.
    """

    _methods = SERVER_METHODS

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._methods:
            raise AttributeError(name)
        return functools.partial(self.peer.ask, name)

    def close(self) -> None:
        """Close the connections; the process goes on."""
        self.peer.close()


@final
class RemoteWorker(RemoteServer):
    """A worker in another process; one that serves only this connection ends by it."""

    _methods = WORKER_METHODS

    def __init__(self, peer: Peer, end: Callable[[], None]) -> None:
        super().__init__(peer)
        self._end = end

    def build(
        self, resource: int, builder: Callable[..., object], uses: Sequence[int] = ()
    ) -> None:
        self.peer.ask("build", resource, dumped(builder), uses)

    def kill(self) -> None:
        self._end()
        self.peer.close("it was ended here")


# Sessions.

COORDINATOR = secrets.token_hex(16)
"""The name of this process as a coordinator; another one has another name."""


class Hello(NamedTuple):
    """Who calls a worker or parameter server, and for what."""

    # To begin a session with this name; join it, as another connection; or end it. Or
    # only to know which devices there are.
    wants: Literal["begin", "join", "end", "devices"]
    coordinator: str  # the name of its process
    strategy: str  # the name of one strategy of it
    life: str = ""  # of a worker
    worker: int = 0
    servers: tuple[str, ...] = ()  # all their addresses, for a worker


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
        why = _raised_by(answer, address)
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
    patience: float = PATIENCE,
    last_output: Callable[[], str | None] = lambda: None,
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
      begin: makes the server or worker of a session.
      methods: that it is asked for.
      told: what the task says of itself.
      is_kept: whether it stays when all connections are gone.
      say: tells people.
    """

    def __init__(
        self,
        begin: Callable[[Hello], object],
        methods: Sequence[str],
        told: Callable[[], Mapping[str, Any]],
        is_kept: bool,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._begin = begin
        self._methods = methods
        self._told = told
        self._is_kept = is_kept
        self._say = say
        self._lock = threading.Lock()
        self._coordinator = ""
        self._past: set[str] = set()
        # By strategy and life: what was begun, and the connections for it.
        self._begun: dict[tuple[str, str], tuple[object, set[Stream]]] = {}
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
        for _, streams in dropped.values():
            _close(streams)

    def _serve(self, stream: Stream) -> None:
        """Answer what comes over a stream, until that is closed."""
        try:
            stream.limit_silence(SECONDS)
            hello = stream.receive()
            stream.limit_silence(None)
            if not isinstance(hello, Hello):
                raise FrameError(f"{hello!r} before any hello")
            try:
                served = self._served(hello, stream)
            except ClusterError as error:
                stream.send_packed(_failed(error))
                return
            stream.send(("done", self._told()))
            while served is not None:
                stream.send_packed(self._answer(served, *stream.receive()))
        except (EOFError, OSError, FrameError):
            pass  # whoever asks is gone
        finally:
            stream.close()
            self._forget(stream)

    def _answer(self, served: object, method: str, *arguments: Any) -> Packed:
        try:
            if method not in self._methods:
                kind = type(served).__name__
                raise ValueError(f"A {kind} was sent a request {method}.")
            values = [a.loaded() if isinstance(a, Dumped) else a for a in arguments]
            return packed(("done", getattr(served, method)(*values)))
        except (Exception, SystemExit) as error:
            # Code that was sent here ends nothing but itself.
            return _failed(error)

    def _served(self, hello: Hello, stream: Stream) -> object | None:
        """What a connection is for; None if all is said."""
        if hello.wants == "devices":
            return None
        key, dropped = (hello.strategy, hello.life), set[Stream]()
        with self._lock:
            is_newest = hello.coordinator == self._coordinator
            if hello.wants == "end":
                found = self._begun.pop(key, None) if is_newest else None
                dropped = set() if found is None else set(found[1])
            elif hello.coordinator in self._past:
                raise ClusterError("it works for another coordinator, which came later")
            else:
                if hello.wants == "begin" and not is_newest:
                    dropped = {s for _, all_ in self._begun.values() for s in all_}
                    self._begun = {}
                    if self._coordinator:
                        self._past.add(self._coordinator)
                    self._coordinator, is_newest = hello.coordinator, True
                    self._say("a new coordinator has come")
                if key not in self._begun or not is_newest:
                    if hello.wants != "begin":
                        raise ClusterError(
                            "it was started anew and has nothing of what was there "
                            "before"
                        )
                    self._begun[key] = self._begin(hello), set()
                found = self._begun[key]
                found[1].add(stream)
        _close(dropped)
        return None if hello.wants == "end" or found is None else found[0]

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            for key, (_, streams) in tuple(self._begun.items()):
                if stream in streams:
                    streams.discard(stream)
                    if not (streams or self._is_kept):
                        del self._begun[key]
