"""Who asks over streams and who answers: servers and workers in other processes.

A request is a tuple of the name of a method and its arguments; its answer is
`("done", value)`, or `("failed", ...)` with what the method raised. Who waits for long
tries another connection meanwhile, so that a process that hangs is not waited for.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np

from jaxstrategy._src.errors import MissingExtraError
from jaxstrategy._src.parameter_servers.protocol import (
    AbstractServer,
    AbstractWorker,
    Builder,
    Call,
    CallNumber,
    Read,
    ServerOperation,
    ShippedProgram,
)
from jaxstrategy._src.parameter_servers.stream import (
    SECONDS,
    FrameError,
    Packed,
    Stream,
    packed,
)


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

    name: str
    message: str
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
            told = f"{self.name}: {self.message}" if self.message else self.name
            error = RuntimeError(told)
        error.add_note(f"Traceback of {where}:\n{self.trace}")
        return error


def failed(error: BaseException) -> Packed:
    """The answer that a request failed."""
    trace = "".join(traceback.format_exception(error))[-_LONGEST:]
    name, message = type(error).__name__, _shown(error)[:_LONGEST]
    return packed(("failed", _Failure(name, message, trace, _faithful(error))))


def raised_by(answer: Any, where: str) -> Exception | None:
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
    """An exception whose `__init__` takes other arguments than it has as `args`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        return _of_parts, (type(error), error.args, vars(error))


def _of_parts(
    cls: type[Exception], args: tuple[Any, ...], state: dict[str, Any]
) -> Exception:
    # `__init__` is left out, and with it what it would make of these arguments.
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


def _shown(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as why:  # of the user's `__str__`
        return f"(its `__str__` raised {type(why).__name__})"


Answer: TypeAlias = Callable[..., object]
"""Answers a request, or raises what the other end shall raise."""


def serve(stream: Stream, answer: Answer) -> None:
    """Answer what comes over a stream, until that is closed."""
    try:
        while True:
            method, *arguments = stream.receive()
            try:
                reply = packed(("done", answer(method, *arguments)))
            except (Exception, SystemExit) as error:
                # Code that was sent here ends nothing but itself.
                reply = failed(error)
            del arguments
            stream.send_packed(reply)
    except (EOFError, OSError, FrameError):
        pass  # whoever asks is gone
    finally:
        stream.close()


PATIENCE = 10.0
"""Seconds without a sign of life, after which a process is lost."""
LONGEST_PATIENCE = 1e6

Dial: TypeAlias = Callable[[float], Stream]
"""A new connection, made within so many seconds."""

_LINES = 20  # of a lost process's output


_RECONNECT_SECONDS = 20.0  # how long a server may be out of reach before it is lost
_RECONNECT_PAUSE = 0.2
_MOST_REPEATS = 3  # of one request; it may be what breaks the connection


@final
class Peer:
    """Another process, of which any number of threads may ask something at once.

    One that `reconnects` is reached again when the network broke, as long as it still
    has all; each request counts once.
    """

    def __init__(
        self,
        name: str,
        dial: Dial,
        lost: type[Exception],
        patience: float = PATIENCE,
        last_output: Callable[[], str | None] | None = None,
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
            first.limit_silence(patience)
            self._all.add(first)
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

    def _asked(self, method: str, *arguments: object) -> Any:
        message = packed((method, *arguments))
        stream = self._taken()
        is_whole = False
        try:
            stream.send_packed(message)
            while stream.is_silent():
                self._check_alive()
            answer = stream.receive()
            failure = raised_by(answer, self._name)
            is_whole = True
        except (EOFError, OSError, FrameError) as error:
            why = _reason(error, self._patience)
            # Else it was reached again meanwhile, over others.
            if stream in self._all:
                self._drop(why)
            raise self._error(self._why or why) from error
        finally:
            # Whatever else ends it, such as Ctrl-C, leaves half a message behind.
            self._put_back(stream, is_whole)
        if failure is not None:
            raise failure
        return answer[1]

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

    def close(self, why: str = "its connections were closed here") -> None:
        """Close all streams; who waits for an answer gets the error of a lost one."""
        self._is_closed = True
        self._drop(why)

    def _drop(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why
            streams = set(self._all)
            self._all.clear()
            self._idle.clear()
        _close(streams)

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
            stream = self._dial(SECONDS)
        except (EOFError, OSError) as error:
            self._drop(why := f"it cannot be reached ({error})")
            raise self._error(self._why or why) from error
        stream.limit_silence(self._patience)
        return stream

    def _check_alive(self) -> None:
        """Nothing if the process answers another connection."""
        try:
            # A quarter of the time has gone.
            self._dial(0.75 * self._patience).close()
        except (EOFError, OSError) as error:
            raise TimeoutError from error

    def _put_back(self, stream: Stream, is_whole: bool) -> None:
        with self._lock:
            if is_whole and stream in self._all:
                self._idle.append(stream)
                return
            self._all.discard(stream)
        stream.close()

    def _error(self, why: str) -> Exception:
        # Without the lock, because `last_output` may wait for the process to end.
        text = f"{self._name} is lost: {why}."
        output = self._last_output() if self._last_output is not None else None
        if output and output.strip():
            lines = output.strip().splitlines()[-_LINES:]
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
    operations: Sequence[ServerOperation], call: CallNumber | None
) -> bool:
    """Whether a push that is made twice changes what it does once."""
    return call is not None or all(each.name == "set" for each in operations)


@final
class RemoteServer(AbstractServer):
    """A parameter server in another process.

    Attributes:
      peer: the server's process, to be replaced when another one is started for it.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def create(self, number: int, value: np.ndarray, is_table: bool = False) -> None:
        self.peer.ask("create", number, np.asarray(value), is_table)

    def drop(self, numbers: Sequence[int]) -> None:
        self.peer.ask("drop", numbers)

    def read(self, reads: Sequence[Read]) -> list[np.ndarray]:
        return self.peer.ask("read", reads)

    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> bool:
        return self.peer.ask("push", operations, call)

    def define(self, key: str, exported: bytes) -> None:
        self.peer.ask("define", key, exported)

    def fence(self, worker: int, incarnation: int) -> None:
        self.peer.ask("fence", worker, incarnation)

    def versions(self, numbers: Sequence[int]) -> list[int]:
        return self.peer.ask("versions", numbers)

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self.peer.close()


@final
class RemoteWorker(AbstractWorker):
    """A worker in another process."""

    def __init__(self, peer: Peer, end: Callable[[], None] | None = None) -> None:
        self._peer = peer
        self._end = end

    def define(self, program: ShippedProgram) -> None:
        self._peer.ask("define", program)

    def build(self, resource: int, builder: Builder, uses: Sequence[int] = ()) -> None:
        self._peer.ask("build", resource, dumped(builder), uses)

    def release(self, resources: Sequence[int]) -> None:
        self._peer.ask("release", resources)

    def call(self, call: Call) -> list[np.ndarray]:
        return self._peer.ask("call", call)

    def own(self, variable: int) -> np.ndarray:
        return self._peer.ask("own", variable)

    def kill(self) -> None:
        if self._end is not None:
            self._end()
        self._peer.close("it was ended here")

    def close(self) -> None:
        """Close the connection; a worker that serves it ends by itself."""
        self._peer.close()


if TYPE_CHECKING:  # it would import JAX
    from jaxstrategy._src.parameter_servers.worker import WorkerEngine


def answers_of_server(server: AbstractServer) -> Answer:
    """Answers the requests of a `RemoteServer`."""
    return _answers(server, AbstractServer.__abstractmethods__)


def answers_of_worker(worker: AbstractWorker | WorkerEngine) -> Answer:
    """Answers the requests of a `RemoteWorker`."""
    return _answers(worker, AbstractWorker.__abstractmethods__ - {"kill"})


def _answers(served: object, methods: frozenset[str]) -> Answer:
    def answer(method: str, *arguments: Any) -> object:
        if method not in methods:
            raise ValueError(f"A {type(served).__name__} was sent a request {method}.")
        values = [a.loaded() if isinstance(a, Dumped) else a for a in arguments]
        return getattr(served, method)(*values)

    return answer
