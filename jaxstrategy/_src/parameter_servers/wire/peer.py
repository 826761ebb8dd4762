"""Who asks over streams, who answers, and errors that travel."""

from __future__ import annotations

import builtins
import os
import pickle
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias, final

import numpy as np

from jaxstrategy._src import errors
from jaxstrategy._src.errors import (
    ClusterError,
    MissingExtraError,
    ParameterServerLost,
)
from jaxstrategy._src.launch.child_process import started
from jaxstrategy._src.parameter_servers.wire.stream import (
    Fields,
    FrameError,
    Kind,
    Stream,
    WireFrame,
)
from jaxstrategy._src.processes.secret import HOW_TO_MAKE_ONE, NETWORK, VARIABLE


def dumped(value: object) -> tuple[bytes, list[np.ndarray]]:
    """An object as bytes, with large buffers of it apart."""
    buffers: list[pickle.PickleBuffer] = []
    blob = _cloudpickle().dumps(value, 5, buffers.append)
    return blob, [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def dumped_plainly(value: object) -> tuple[bytes, list[np.ndarray]]:
    """As `dumped`, of an object whose class both sides import: without cloudpickle."""
    buffers: list[pickle.PickleBuffer] = []
    blob = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return blob, [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def loaded(blob: bytes, arrays: Sequence[np.ndarray]) -> Any:
    """The object again. This runs whatever its sender wants to be run."""
    return pickle.loads(blob, buffers=arrays)


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle
    except ImportError:
        raise MissingExtraError(
            "Functions and datasets are sent to workers in other processes by "
            "cloudpickle, which is not installed: pip install "
            "'jaxstrategy[coordinator]'"
        ) from None
    return cloudpickle


_LONGEST = 1 << 16  # characters of a message or a traceback


def failed(error: BaseException, may_pickle: bool) -> WireFrame:
    """The answer that a request failed."""
    fields = {
        "type": type(error).__name__,
        "message": _shown(error)[:_LONGEST],
        "args": _plain(error.args),
        "traceback": "".join(traceback.format_exception(error))[-_LONGEST:],
    }
    blob = b""
    if may_pickle and isinstance(error, Exception):
        blob = _faithful(error)
    return WireFrame(Kind.FAILED, fields, blob)


def raised_by(frame: WireFrame, where: str, may_unpickle: bool) -> Exception:
    """The exception that an answer carries, with the traceback of the other process."""
    fields = frame.fields if isinstance(frame.fields, dict) else {}
    error = _loaded(frame.blob) if frame.blob and may_unpickle else None
    if error is None:
        name, message = str(fields.get("type")), str(fields.get("message"))
        error = _by_name(name, message, fields.get("args"))
    error.add_note(f"Traceback of {where}:\n{fields.get('traceback')}")
    return error


def _faithful(error: Exception) -> bytes:
    """The exception pickled such that it comes out the same; nothing if it cannot."""
    for form in (error, _Parts(error)):
        try:
            blob = _blob(form)
            again = loaded(blob, ())
        except Exception:  # of the user's class, whatever it raises
            continue
        if type(again) is type(error) and _shown(again) == _shown(error):
            return blob
    return b""


def _blob(form: object) -> bytes:
    try:
        return dumped(form)[0]
    except MissingExtraError:
        return dumped_plainly(form)[0]


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


def _loaded(blob: bytes) -> Exception | None:
    try:
        error = loaded(blob, ())
    except Exception:  # such as a module that only the other process can import
        return None
    return error if isinstance(error, Exception) else None


def _by_name(name: str, message: str, args: object) -> Exception:
    """An exception of Python or of ours with that message."""
    cls = getattr(builtins, name, None) or getattr(errors, name, None)
    if isinstance(cls, type) and issubclass(cls, Exception) and isinstance(args, list):
        try:
            error = cls(*args)
        except Exception:  # such as a class of the same name with other arguments
            pass
        else:
            if _shown(error) == message:
                return error
    return RuntimeError(f"{name}: {message}" if message else name)


def _plain(args: tuple[object, ...]) -> list[object] | None:
    """Arguments, if they are such as JSON has."""
    kinds = str | int | float | None
    if all(isinstance(each, kinds) and len(str(each)) <= _LONGEST for each in args):
        return list(args)
    return None


def _shown(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as why:  # of the user's `__str__`
        return f"(its `__str__` raised {type(why).__name__})"


LONGEST_PATIENCE = 1e6
"""Seconds that somebody may wait for a sign of life."""

_ALIVE = WireFrame(Kind.ALIVE)
_PER_PATIENCE = 4  # signs within the time that the other end waits for one
_SHORTEST = 0.02


class _Busy:
    """A stream at whose other end somebody may wait."""

    __slots__ = ("stream", "pause", "since")

    def __init__(self, stream: Stream, pause: float) -> None:
        self.stream, self.pause = stream, pause
        self.since: float | None = None


@final
class Heartbeat:
    """A thread that tells who waits for an answer that it is being worked at."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._busy: dict[int, _Busy] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, stream: Stream, patience: float) -> None:
        """Know a stream, whose other end waits so many seconds for a sign."""
        pause = max(patience / _PER_PATIENCE, _SHORTEST)
        with self._lock:
            if self._is_closed:
                return
            self._busy[id(stream)] = _Busy(stream, pause)
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


Answer: TypeAlias = Callable[[WireFrame, Stream], WireFrame]
"""Makes the answer to a request, or raises what the other end shall raise."""


@final
class Responder:
    """Answers what comes over streams, each with a thread of its own."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
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
            self._heartbeat.add(stream, _patience(request))
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
            return failed(error, stream.is_trusted)
        except SystemExit as error:
            # Code that was sent here ends nothing but itself.
            return failed(error, may_pickle=False)

    def _send(self, stream: Stream, answer: WireFrame) -> None:
        try:
            stream.send(answer)
        except (FrameError, TypeError) as error:  # nothing of it was sent
            stream.send(failed(error, stream.is_trusted))


def done(fields: Fields = None, arrays: Sequence[np.ndarray] = ()) -> WireFrame:
    """The answer that a request was fulfilled."""
    return WireFrame(Kind.DONE, fields, b"", arrays)


def check_trusted(stream: Stream, what: str) -> None:
    """Nothing if the other end of a stream is known to be of the job."""
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


PATIENCE = 10.0
"""Seconds without a sign of life, after which a process is lost."""

_LINES = 20  # of a lost process's output


@final
class Peer:
    """Another process, of which any number of threads may ask something at once."""

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

    def ask(self, request: WireFrame) -> WireFrame:
        """The answer to a request."""
        stream = self._taken()
        answer = self._exchanged(stream, request)
        if answer.kind == Kind.FAILED:
            raise raised_by(answer, self._name, stream.is_trusted)
        return answer

    def close(self, why: str = "its connections were closed here") -> None:
        """Close all streams; who waits for an answer gets the error of a lost one."""
        with self._lock:
            self._why = self._why or why
            streams = set(self._all)
            self._all.clear()
            self._idle.clear()
        _close(streams)

    def _exchanged(self, stream: Stream, request: WireFrame) -> WireFrame:
        is_whole = False
        try:
            stream.send(request)
            while (answer := _received(stream)).kind == Kind.ALIVE:
                pass
            if answer.kind not in (Kind.DONE, Kind.FAILED):
                raise ConnectionError(f"it answered with a message {answer.kind}")
            is_whole = True
        except (FrameError, TypeError):
            is_whole = True  # nothing was sent
            raise
        except (EOFError, OSError) as error:
            raise self._losing(_reason(error, self._patience)) from error
        finally:
            # Whatever else ends it, such as Ctrl-C, leaves half a message behind.
            self._put_back(stream, is_whole)
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


def _close(streams: set[Stream]) -> None:
    for stream in streams:
        stream.close()


def _received(stream: Stream) -> WireFrame:
    try:
        return stream.receive()
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


_RECONNECT_SECONDS = 20.0  # how long a server may be out of reach before it is lost
_RECONNECT_PAUSE = 0.2
_MOST_REPEATS = 3  # of one request; it may be what breaks the connection


@final
class ReconnectingPeer:
    """A parameter server that is reached again when the network broke.

    That is tried as long as the server still has all; each request counts once.
    """

    def __init__(
        self,
        name: str,
        dial: Callable[[], Stream],
        patience: float,
        last_output: Callable[[], str | None] | None = None,
    ) -> None:
        self._name = name
        self._dial = dial
        self._patience = patience
        self._last_output = last_output
        self._lock = threading.Lock()
        self._is_closed = False
        self._now = self._connected([])

    def ask(self, request: WireFrame) -> WireFrame:
        """The answer to a request."""
        for repeats in range(_MOST_REPEATS + 1):
            peer = self._now
            try:
                if repeats and request.kind == Kind.CREATE:
                    # It may be there already.
                    peer.ask(WireFrame(Kind.DROP, request.fields[:1]))
                return peer.ask(request)
            except ParameterServerLost as lost:
                if repeats == _MOST_REPEATS:
                    raise
                self._connect_again(peer, lost)
                if not _counts_once(request):
                    raise ParameterServerLost(
                        f"{lost} It was reached again, but whether the change that "
                        "was being made counts is not known."
                    ) from lost
        raise AssertionError  # the last one returns or raises

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._is_closed = True
        self._now.close()

    def _connect_again(self, broken: Peer, lost: ParameterServerLost) -> None:
        """Reach the server over new connections."""
        with self._lock:  # the first that finds it broken connects for all
            end = time.monotonic() + _RECONNECT_SECONDS
            while self._now is broken:
                if self._is_closed or time.monotonic() >= end:
                    raise lost
                try:
                    stream = self._dial()
                except (ConnectionAbortedError, ConnectionRefusedError) as error:
                    said = self._last_output() if self._last_output else None
                    more = f"\nThe last that it wrote:\n{said}" if said else ""
                    raise ParameterServerLost(
                        f"{self._name} is lost: {error}.{more}"
                    ) from lost
                except ConnectionError:
                    time.sleep(_RECONNECT_PAUSE)
                else:
                    self._now = self._connected([stream])

    def _connected(self, made: list[Stream]) -> Peer:
        def dial() -> Stream:
            try:
                return made.pop()
            except IndexError:
                return self._dial()

        peer = Peer(
            self._name, dial, ParameterServerLost, self._patience, self._last_output
        )
        if made:
            peer.ask(WireFrame(Kind.PING))  # so that the stream is its to close
        return peer


def _counts_once(request: WireFrame) -> bool:
    """Whether a request that is made twice changes what it does once."""
    if request.kind != Kind.PUSH:
        return True
    call, operations = request.fields
    return call is not None or all(name == "set" for name, *_ in operations)
