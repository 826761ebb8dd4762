"""Servers and workers in other processes: who asks over streams, and who answers.

A request is a tuple of the name of a method and its arguments; its answer is the value,
or a `_Failure` with what the method raised. Who waits for long tries another connection
meanwhile, so that a process that hangs is not waited for.

A session is one strategy's, with a server or with one life of a worker. Any number of
connections belong to it. A task works for the newest coordinator, and for no other one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import secrets
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

import numpy as np

from jaxstrategy._src.errors import ClusterError, MissingExtraError
from jaxstrategy._src.launch.child_process import (
    OutputThread,
    StartedProcess,
    described,
)
from jaxstrategy._src.parameter_servers.protocol import CallNumber, ServerOperation
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

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        trace = "".join(traceback.format_exception(error))[-_LONGEST:]
        name, message = type(error).__name__, _shown(error)[:_LONGEST]
        return cls(f"{name}: {message}" if message else name, trace, _faithful(error))

    def raised(self, where: str) -> Exception:
        """The exception, with the traceback of the other process."""
        error: object = None
        try:
            error = _rebuilt(self.error)
        except Exception:  # such as a module that only the other process can import
            pass
        if not isinstance(error, Exception):
            error = RuntimeError(self.shown)
        error.add_note(f"Traceback of {where}:\n{self.trace}")
        return error


def _faithful(error: BaseException) -> bytes:
    """The exception pickled such that it comes out the same; nothing if it cannot."""
    if not isinstance(error, Exception):
        return b""
    # The second for those whose `__init__` takes other arguments than `args`.
    for form in (error, (type(error), error.args, vars(error))):
        try:
            try:
                blob = dumped(form).blob
            except MissingExtraError:
                blob = pickle.dumps(form, 5)
            again = _rebuilt(blob)
        except Exception:  # of the user's class, whatever it raises
            continue
        if type(again) is type(error) and _shown(again) == _shown(error):
            return blob
    return b""


def _rebuilt(blob: bytes) -> Any:
    found = pickle.loads(blob)
    if not isinstance(found, tuple):
        return found
    cls, args, state = found
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


def _shown(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as why:  # of the user's `__str__`
        return f"(its `__str__` raised {type(why).__name__})"


# Who asks.

_DRAIN_SECONDS = 1.0


@final
class Task:
    """A process that listens at an address, or will."""

    def __init__(
        self,
        name: str,  # what it is, for people
        address: str,
        # Starts it, given what to call with its return code; None: somebody else does.
        start: Callable[[Callable[[int], None]], StartedProcess] | None = None,
        release: Callable[[], None] = lambda: None,  # gives its place to the next one
        hidden: str = "\0",  # how lines begin that it writes and nobody need see
        news_seconds: float = 1.0,  # until one hears of its end
    ) -> None:
        self.name, self.address = name, address
        self.over = threading.Event()  # set when it is known to have ended
        self._release = release
        self._news_seconds = news_seconds
        self._hidden = hidden.encode()
        self._code: int | None = None
        self._building = threading.Lock()
        self.process: StartedProcess | None = None
        if start is not None:
            with self._building:  # some end at once
                self.process = start(self._end)
                read = functools.partial(self.process.read, 0)
                self._output = OutputThread(name, read, self._show)

    @property
    def shown(self) -> str:
        """What it is and where, as a sentence begins; a path says nobody anything."""
        name, is_path = self.name.capitalize(), self.address.startswith("/")
        return name if is_path else f"{name} at {self.address}"

    def why(self, what: str, error: object) -> str:
        """Why something is so, for people; with the last lines that it wrote."""
        text = f"{self.shown} {what}: {error}."
        if self.process is None:
            return text
        # Its connections break before it is known that it is over.
        if self.over.wait(self._news_seconds):
            self._output.finish(_DRAIN_SECONDS)
        lines = [line.decode(errors="replace") for line in self._output.tail]
        if self._code is not None:
            lines.append(f"(it ended with {described(self._code)})")
        said = "\n".join(lines).strip()
        return f"{text}\nThe last that it wrote:\n{said}" if said else text

    def kill(self) -> None:
        """End it now, and what it has started, if this process has started it."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """Wait for its end, and for what it has written."""
        if self.process is not None:
            self.process.close()
            self._output.finish(_DRAIN_SECONDS)
            self._release()

    def _end(self, code: int) -> None:
        with self._building:
            self._code = code
        self.over.set()
        self.close()

    def _show(self, line: bytes) -> None:
        if line.startswith(self._hidden):
            return
        stream = sys.stderr
        # Notebooks have streams of their own, and some programs have none.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.write(f"[{self.name}] {line.decode(errors='replace')}\n")
            stream.flush()


PATIENCE = 10.0
"""Seconds without a sign of life, after which a process is lost."""
LONGEST_PATIENCE = 1e6
_RECONNECT_SECONDS = 20.0  # how long a server may be out of reach before it is lost
_RECONNECT_PAUSE = 0.2
_MOST_REPEATS = 3  # of one request; it may be what breaks the connection


@final
class Peer:
    """A server or worker elsewhere; its methods are requests, of any thread."""

    def __init__(
        self,
        task: Task,
        secret: Secret | None,  # of the job; None on this host
        joining: Hello,  # what new connections say
        lost: type[Exception],
        *,
        patience: float = PATIENCE,  # seconds without a sign of life: it is lost
        # Whether it is reached again when the network broke, as long as it still has
        # all; each request counts once.
        reconnects: bool = False,
        first: Stream | None = None,
    ) -> None:
        if not 0 < patience <= LONGEST_PATIENCE:
            raise ValueError(
                f"The patience was {patience!r}; seconds from 0 to "
                f"{LONGEST_PATIENCE:g} were wanted, 0 excluded."
            )
        self._secret, self._joining = secret, joining
        self._lost = lost
        self._patience = patience
        self._most_repeats = _MOST_REPEATS if reconnects else 0
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._reconnecting = threading.Lock()
        self._is_closed = False
        self._connections = _Connections(task)
        if first is not None:
            self._keep(first, self._connections)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self.ask, method)

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

    def build(
        self, resource: int, builder: Callable[..., object], uses: Sequence[int] = ()
    ) -> None:
        """As a worker's, which gets the function by cloudpickle."""
        self.ask("build", resource, dumped(builder), uses)

    def kill(self) -> None:
        """End a worker now; one that somebody else has started forgets its life."""
        self._connections.task.kill()
        self.close("it was ended here")

    def move_to(self, task: Task) -> None:
        """Go on with another process in its place, which has nothing."""
        self._drop(self._connections, "another process was started in its place")
        self._connections = _Connections(task)

    def close(self, why: str = "its connections were closed here") -> None:
        """Close all streams; who waits for an answer gets the error of a lost one."""
        self._is_closed = True
        self._drop(self._connections, why)

    def _asked(self, method: str, *arguments: object) -> Any:
        if os.getpid() != self._process:
            raise self._lost(
                f"{self._connections.task.shown} was connected to a process of which "
                "this one is a fork, and must not be asked by both. Start processes by "
                "spawn, or make the strategy in this one."
            )
        message, connections = packed((method, *arguments)), self._connections
        stream = self._taken(connections)
        try:
            stream.send_packed(message)
            while stream.is_silent():
                try:  # whether the process answers another connection
                    # A quarter of the time has gone.
                    self._dial(connections, 0.75 * self._patience).close()
                except OSError as error:
                    raise TimeoutError from error
            answer = stream.receive()
        except (EOFError, OSError, FrameError) as error:
            self._drop(connections, _reason(error, self._patience))
            raise self._error(connections) from error
        except BaseException:  # such as Ctrl-C, which leaves half a message behind
            with self._lock:
                connections.streams.discard(stream)
            stream.close()
            raise
        with self._lock:
            if connections.why is None:
                connections.idle.append(stream)
        if isinstance(answer, _Failure):
            raise answer.raised(connections.task.shown)
        return answer

    def _dial(self, connections: _Connections, seconds: float = SECONDS) -> Stream:
        address = connections.task.address
        return joined(address, self._secret, self._joining, seconds)[0]

    def _taken(self, connections: _Connections) -> Stream:
        with self._lock:
            if connections.idle:
                return connections.idle.pop()
        if connections.why is not None:
            raise self._error(connections)
        try:
            stream = self._dial(connections)
        except OSError as error:
            self._drop(connections, f"it cannot be reached ({error})")
            raise self._error(connections) from error
        self._keep(stream, connections)
        return self._taken(connections)

    def _keep(self, stream: Stream, connections: _Connections) -> None:
        """Have a connection more, unless they are lost."""
        stream.limit_silence(self._patience)
        with self._lock:
            if connections.why is None:
                connections.streams.add(stream)
                connections.idle.append(stream)
                return
        stream.close()

    def _connect_again(self, lost: Exception) -> None:
        """Reach the process over new connections."""
        with self._reconnecting:  # the first that finds it lost connects for all
            end = time.monotonic() + _RECONNECT_SECONDS
            while (before := self._connections).why is not None:
                if self._is_closed or time.monotonic() >= end:
                    raise lost
                try:
                    stream = self._dial(before)
                except (ConnectionAbortedError, ConnectionRefusedError) as error:
                    raise self._lost(before.task.why("is lost", error)) from lost
                except ConnectionError:
                    time.sleep(_RECONNECT_PAUSE)
                    continue
                self._connections = _Connections(before.task)
                self._keep(stream, self._connections)
                if self._is_closed:  # just now
                    self._drop(self._connections, str(lost))

    def _drop(self, connections: _Connections, why: str) -> None:
        with self._lock:
            connections.why = connections.why or why
            streams = tuple(connections.streams)
            connections.streams.clear()
            connections.idle.clear()
        _close(streams)

    def _error(self, connections: _Connections) -> Exception:
        # Without the lock, because it may wait for the process to end.
        return self._lost(connections.task.why("is lost", connections.why))


@final
class _Connections:
    """Those to one process, until it is lost or replaced."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.why: str | None = None  # they are lost
        self.streams: set[Stream] = set()
        self.idle: list[Stream] = []
        weakref.finalize(self, _close, self.streams)


def _close(streams: Iterable[Stream]) -> None:
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
    stream = dialled(address, secret, seconds)
    try:
        stream.limit_silence(seconds)
        stream.send(hello)
        answer = stream.receive()
        stream.limit_silence(None)
    except (EOFError, OSError, FrameError) as error:
        stream.close()
        raise ConnectionError(f"{address} does not answer ({error})") from error
    if isinstance(answer, _Failure):
        stream.close()
        raise ConnectionAbortedError(str(answer.raised(address)))
    return stream, answer


@final
class SessionHost:
    """Answers connections for the newest coordinator, and for no earlier one."""

    def __init__(
        self,
        begin: Callable[[Hello], Any],  # the server or worker of a session
        told: Callable[[], Mapping[str, Any]],  # what the task says of itself
        is_kept: bool,  # whether what was begun stays when all connections are gone
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._begin = begin
        self._told = told
        self._is_kept = is_kept
        self._say = say
        self._lock = threading.Lock()
        self._coordinator = ""
        self._past: set[str] = set()
        # By strategy and life: what was begun, and the connections for it.
        self._begun: dict[tuple[str, str], tuple[Any, set[Stream]]] = {}
        self._listener: Listener | None = None

    def listen(self, address: str, secret: Secret | None = None) -> None:
        """Serve those who connect, in threads."""
        self._listener = Listener(address, secret, self._serve)

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
                stream.send(_Failure.of(error))
                return
            stream.send(self._told())
            while served is not None:
                stream.send_packed(_answer(served, *stream.receive()))
        except (EOFError, OSError, FrameError):
            pass  # whoever asks is gone
        finally:
            stream.close()
            self._forget(stream)

    def _served(self, hello: Hello, stream: Stream) -> Any:
        """What a connection is for; None if all is said."""
        if hello.wants == "devices":
            return None
        key = hello.strategy, hello.life
        dropped: Iterable[Stream] = ()
        with self._lock:
            is_newest = hello.coordinator == self._coordinator
            if hello.wants == "end":
                if is_newest:
                    _, dropped = self._begun.pop(key, (None, set()))
                served = None
            elif hello.coordinator in self._past:
                raise ClusterError("it works for another coordinator, which came later")
            else:
                if hello.wants == "begin" and not is_newest:
                    dropped = [s for _, all_ in self._begun.values() for s in all_]
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
                served, streams = self._begun[key]
                streams.add(stream)
        _close(tuple(dropped))
        return served

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            for key, (_, streams) in tuple(self._begun.items()):
                if stream in streams:
                    streams.discard(stream)
                    if not (streams or self._is_kept):
                        del self._begun[key]


def _answer(served: Any, method: str, *arguments: Any) -> Packed:
    try:
        if method not in served.requests:
            kind = type(served).__name__
            raise ValueError(f"A {kind} was sent a request {method}.")
        values = [a.loaded() if isinstance(a, Dumped) else a for a in arguments]
        return packed(getattr(served, method)(*values))
    except (Exception, SystemExit) as error:
        # Code that was sent here ends nothing but itself.
        return packed(_Failure.of(error))
