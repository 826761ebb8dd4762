"""Values that all processes share, and news of those that have ended."""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import itertools
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypedDict, TypeGuard, final

from jaxstrategy._errors import ClusterError
from jaxstrategy.processes import _channel
from jaxstrategy.processes._channel import (
    Connection,
    Fields,
    Json,
    Message,
    has,
    is_anything,
    is_one_of,
    is_seconds,
    is_text,
    is_whole,
    or_none,
    row,
    rows,
)
from jaxstrategy.processes._rendezvous import Meeting, Member
from jaxstrategy.text._lists import listed


class Status(TypedDict):
    """The progress of a process, as its watchdog reports it each second.

    Attributes:
      step: the number of steps it has begun.
      what: the last of them in words.
      pending: the step or event it waits for, None if it waits for nothing.
      seconds: how long it has waited, or since there was progress.
      busy: its own work meanwhile, such as compiling; None if it has none.
      writes: the checkpoint it writes in the background, None if it writes none.
      reads: batches that its input pipeline has not delivered, each with the seconds
        that it has taken so far.
      arrivals: its last steps; of each its number, the number of comparisons before it,
        and the seconds since the last of them.
    """

    step: int
    what: str
    pending: str | None
    seconds: float | None
    busy: str | None
    writes: str | None
    reads: list[tuple[str, float]]
    arrivals: list[tuple[int, int, float]]


_STATUS: Fields = {
    "step": is_whole,
    "what": is_text,
    "pending": or_none(is_text),
    "seconds": or_none(is_seconds),
    "busy": or_none(is_text),
    "writes": or_none(is_text),
    "reads": rows(row(is_text, is_seconds)),
    "arrivals": rows(row(is_whole, is_whole, is_seconds)),
}


def _is_status(value: object) -> bool:
    return value is None or has(value, _STATUS)


def _is_end(value: object) -> bool:
    return value in ("left", "failed", "died", "silent")


_REQUESTS: Mapping[str, Fields] = {
    "alive": {"status": _is_status},
    "put": {"key": is_text, "value": is_anything},
    "get": {"id": is_whole, "key": is_text},
    "gather": {"id": is_whole, "key": is_text, "value": is_anything},
    "cancel": {"id": is_whole, "cancelled": is_whole},
    "states": {"id": is_whole},
    "failed": {"text": is_text},
    "left": {"status": _is_status},
}
_NEWS: Mapping[str, Fields] = {
    "ping": {},
    "ended": {
        "process": is_whole,
        "end": _is_end,
        "text": is_text,
        "status": _is_status,
    },
    "all left": {},
}
_GONE: Fields = {"id": is_whole, "gone": rows(row(is_whole, _is_end, is_text))}
_ANSWERS: tuple[Fields, ...] = (
    {"id": is_whole, "value": is_anything},
    {"id": is_whole, "refused": is_text},
)


def is_request(message: object) -> TypeGuard[Message]:
    """Whether a process says so something to process 0."""
    return is_one_of(message, _REQUESTS)


def is_reply(message: object, count: int) -> TypeGuard[Message]:
    """Whether process 0 says so something to a process.

    Args:
      count: how many processes there are.
    """
    if is_one_of(message, _NEWS):
        process = message.get("process", 0)
        return is_whole(process) and process < count
    if has(message, _GONE):
        return all(index < count for index, *_ in message["gone"])
    return any(has(message, answer) for answer in _ANSWERS)


LATE_SECONDS = 3.0
"""Processes report each second; one that is late by so much is reported as silent."""


@dataclasses.dataclass(frozen=True)
class Departure:
    """A process that takes part no more; prints as a clause about it.

    Attributes:
      end: `"left"` (its script has ended), `"failed"` (by an exception, told in
        `text`), `"died"` (its connection broke) or `"silent"` (it stopped answering).
      status: its watchdog's last word, None if it never said one.
    """

    member: Member
    end: str
    text: str = ""
    status: Status | None = None

    def __str__(self) -> str:
        match self.end:
            case "left":
                return f"{self.member} has finished already"
            case "failed":
                return f"{self.member} failed: {self.text}"
            case "silent":
                return (
                    f"{self.member} has not answered for {self.text} s: it is "
                    "stopped, or its host is"
                )
        return (
            f"{self.member} has died: killed, out of memory or crashed; its own output "
            "may say more"
        )


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """The state of a process.

    Attributes:
      status: what its watchdog last said, None if nothing.
      end, text: None and empty while it runs, else as in `Departure`.
      silent_seconds: how long it has not answered; about 1 at most is usual.
    """

    member: Member
    status: Status | None
    end: str | None
    silent_seconds: float
    text: str = ""

    @property
    def busy(self) -> str | None:
        """Its own work, for which others may wait; None if it has none."""
        return self._heard["busy"] if self._heard else None

    @property
    def writes(self) -> str | None:
        """The checkpoint it writes in the background; None if it writes none."""
        return self._heard["writes"] if self._heard else None

    @property
    def _heard(self) -> Status | None:
        """Its last status if it runs and answers, else None."""
        is_recent = self.end is None and self.silent_seconds < LATE_SECONDS
        return self.status if is_recent else None


class AbstractBoard(abc.ABC):
    """Values that all processes share, and news of those that have ended.

    All methods may be called from any thread. Values are what JSON can say.

    Attributes:
      members: all processes, by their ids.
      index: which of them this one is.
      departures: the processes that have ended, by their ids.
      common_error: the text of an error that each process was given, by which each of
        them may end; None if there was none.
    """

    members: tuple[Member, ...]
    index: int
    departures: dict[int, Departure]
    common_error: str | None = None

    @abc.abstractmethod
    def put(self, key: str, value: Json) -> None:
        """Let all processes `get` a value; a second one replaces the first."""

    @abc.abstractmethod
    def get(self, key: str, timeout_seconds: float | None = None) -> Json:
        """The value that some process has put or will put within the time.

        Raises:
          ClusterError: none did, or none can any more.
        """

    @abc.abstractmethod
    def gather(
        self, key: str, value: Json, timeout_seconds: float | None = None
    ) -> list[Json]:
        """Contribute a value; get those of all processes, in the order of their ids.

        The n-th call with a key on one process meets the n-th on each other. Without a
        time of its own it waits the board's, and longer while a process is busy.

        Raises:
          ClusterError: not all did so in time, or one has ended; they are named.
        """

    def barrier(self, name: str, timeout_seconds: float | None = None) -> None:
        """Wait until all processes have come here; raises as `gather` does."""
        self.gather(f"barrier: {name}", None, timeout_seconds)

    @abc.abstractmethod
    def states(self) -> list[ProcessState]:
        """The state of each process, by their ids.

        Raises:
          ClusterError: process 0, which keeps them, does not answer.
        """

    def known_states(self) -> list[ProcessState]:
        """The same without a message: in process 0; empty in the others."""
        return []

    @abc.abstractmethod
    def on_departure(self, callback: Callable[[Departure], None]) -> None:
        """Have a function called, on another thread, for each process that ends.

        Those that have ended already are told at once.
        """

    def fail(self, text: str) -> None:
        """Tell all others that this process ends, and why; they end as well."""
        return  # nobody else is there

    def look_at_process_0(self) -> None:
        """Note that process 0 has ended if it has been silent for too long."""
        return  # this process keeps the board

    def forgive_silence(self) -> None:
        """Count the silence of process 0 from now: this one was itself stopped."""
        return


@final
class LoneBoard(AbstractBoard):
    """The board of a job of one process.

    >>> board = LoneBoard()
    >>> board.gather("rows", 12)
    [12]
    """

    def __init__(self) -> None:
        self.index = 0
        self.members = (Member(0, socket.gethostname(), os.getpid()),)
        self.departures = {}
        self._values: dict[str, Json] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: Json) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_seconds: float | None = None) -> Json:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_seconds):
                raise ClusterError(nobody_put(key, timeout_seconds or 0))
            return self._values[key]

    def gather(
        self, key: str, value: Json, timeout_seconds: float | None = None
    ) -> list[Json]:
        return [value]

    def states(self) -> list[ProcessState]:
        return [ProcessState(self.members[0], None, None, 0.0)]

    def on_departure(self, callback: Callable[[Departure], None]) -> None:
        pass  # nobody else is there


def nobody_put(key: str, seconds: float) -> str:
    """The reason why `get` failed."""
    return f"Nobody has put {key!r} on the board within {seconds:g} s."


_TICK_SECONDS = 1.0
# A thread that should run each second and did not for so long was stopped itself.
_STOPPED_SECONDS = 5.0


class _Client:
    """A process, as the hub sees it."""

    def __init__(self, index: int, connection: Connection) -> None:
        self.index = index
        self.sock = connection.sock
        self.channel = connection.channel
        self.outgoing = bytearray()
        self.heard = time.monotonic()
        self.status: Status | None = None
        self.end: str | None = None  # how it ended: left, failed, died or silent
        self.text = ""


class Hub:
    """Serves the boards of all processes until all have left.

    Args:
      connections: the connection to each process.
      silence_seconds: a process that says nothing for so long counts as dead.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        silence_seconds: float,
    ) -> None:
        self._clients = {k: _Client(k, connections[k]) for k in sorted(connections)}
        self._silence_seconds = silence_seconds
        self._values: dict[str, object] = {}
        self._asked: dict[str, list[tuple[int, int]]] = {}
        # Of each key and process: what it contributed, and the request it waits with.
        self._gathers: dict[str, dict[int, collections.deque[tuple[int, object]]]] = {}
        self._selector = selectors.DefaultSelector()
        self._ticked = time.monotonic()
        self._all_left = False
        self._thread = threading.Thread(
            target=self._serve, name="jaxstrategy-hub", daemon=True
        )

    def start(self) -> None:
        """Begin to serve."""
        for client in self._clients.values():
            client.sock.setblocking(False)
            self._selector.register(client.sock, selectors.EVENT_READ, client)
        self._thread.start()

    def join(self, timeout_seconds: float) -> None:
        """Wait until all processes have hung up."""
        self._thread.join(timeout_seconds)

    def close_in_forked_child(self) -> None:
        """Close the child's copies and leave the parent's selector alone."""
        # An epoll object is shared: to unregister here would do so in the parent.
        for client in self._clients.values():
            client.sock.close()

    def _serve(self) -> None:
        for client in self._clients.values():
            self._take(client)  # what came in before we began
        while self._selector.get_map():
            for key, events in self._selector.select(_TICK_SECONDS):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            self._tick()
        self._selector.close()

    def _read(self, client: _Client) -> None:
        try:
            received = client.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:  # reset, as where a process was killed: it has hung up, too
            received = b""
        if not received:
            self._hung_up(client)
            return
        client.channel.add(received)
        client.heard = time.monotonic()
        self._take(client)

    def _take(self, client: _Client) -> None:
        try:
            for message in client.channel.messages():
                if not is_request(message):
                    raise ValueError("it sent something that is no request")
                self._obey(client, message)
        except ValueError as error:
            if not self._all_left:
                self._ended(client, "failed", f"its messages make no sense: {error}")
            self._hung_up(client)

    def _obey(self, client: _Client, message: Message) -> None:
        match message["op"]:
            case "alive":
                client.status = message["status"]
            case "put":
                self._put(message["key"], message["value"])
            case "get":
                self._get(client, message)
            case "gather":
                entry = message["id"], message["value"]
                waiting = self._gathers.setdefault(message["key"], {})
                waiting.setdefault(client.index, collections.deque()).append(entry)
                self._complete(message["key"])
            case "cancel":
                self._cancel(client, message)
            case "states":
                self._post(client, {"id": message["id"], "value": self.states()})
            case "failed":
                self._ended(client, "failed", message["text"])
            case "left":
                client.status = message["status"]
                self._ended(client, "left", "")

    def _put(self, key: str, value: object) -> None:
        self._values[key] = value
        for index, request in self._asked.pop(key, []):
            self._post(self._clients[index], {"id": request, "value": value})

    def _get(self, client: _Client, message: Message) -> None:
        key = message["key"]
        if key in self._values:
            self._post(client, {"id": message["id"], "value": self._values[key]})
        elif gone := self._gone_for_good(client):
            self._refuse(client, message["id"], gone)
        else:
            self._asked.setdefault(key, []).append((client.index, message["id"]))

    def _gone_for_good(self, client: _Client) -> list[int]:
        """The processes whose end means that nothing will be put any more."""
        others = [other for other in self._clients.values() if other is not client]
        ended = [other.index for other in others if other.end not in (None, "left")]
        if not ended and all(other.end for other in others):
            ended = [other.index for other in others]
        return ended

    def _complete(self, key: str) -> None:
        """Answer a gather if all have contributed, or if somebody never will."""
        waiting = self._gathers[key]
        absent = [k for k in self._clients if not waiting.get(k)]
        if not absent:
            entries = {k: waiting[k].popleft() for k in self._clients}
            values = [value for _, value in entries.values()]
            for index, (request, _) in entries.items():
                self._post(self._clients[index], {"id": request, "value": values})
            if not any(waiting.values()):
                del self._gathers[key]
        elif gone := [k for k in absent if self._clients[k].end]:
            for index in waiting:
                for request, _ in waiting[index]:
                    self._refuse(self._clients[index], request, gone)
            del self._gathers[key]

    def _cancel(self, client: _Client, message: Message) -> None:
        """Forget a request that took too long; say who has not contributed."""
        request, absent = message["cancelled"], []
        for key, waiting in list(self._gathers.items()):
            entries = waiting.get(client.index, ())
            kept = collections.deque(e for e in entries if e[0] != request)
            if len(kept) < len(entries):
                absent = [k for k in self._clients if not waiting.get(k)]
                waiting[client.index] = kept
                if not any(waiting.values()):
                    del self._gathers[key]
        for asked in self._asked.values():
            with contextlib.suppress(ValueError):
                asked.remove((client.index, request))
        self._post(client, {"id": message["id"], "value": absent})

    def _refuse(self, client: _Client, request: int, gone: list[int]) -> None:
        ends = [[k, self._clients[k].end, self._clients[k].text] for k in gone]
        self._post(client, {"id": request, "gone": ends})

    def states(self) -> list[Message]:
        """The state of each process, by their ids; any thread may ask."""
        now = time.monotonic()
        return [
            {
                "status": client.status,
                "end": client.end,
                "text": client.text,
                "silent": self._silent(client, now),
            }
            for client in self._clients.values()
        ]

    def _silent(self, client: _Client, now: float) -> float:
        is_asked = client.index != 0 and client.end is None
        return round(now - client.heard, 1) if is_asked else 0.0

    def _hung_up(self, client: _Client) -> None:
        self._selector.unregister(client.sock)
        client.sock.close()
        if client.end is None or (client.end == "left" and not self._all_left):
            self._ended(client, "died", "")

    def _ended(self, client: _Client, end: str, text: str) -> None:
        # Who has left waits for the others and may still die; other ends are final.
        if client.end is not None and (client.end != "left" or end == "left"):
            return
        client.end, client.text = end, text
        told = {
            "op": "ended",
            "process": client.index,
            "end": end,
            "text": text,
            "status": client.status,
        }
        for other in self._clients.values():
            if other is not client:
                self._post(other, told)
        for key in list(self._gathers):
            self._complete(key)
        self._refuse_askers()
        if all(other.end == "left" for other in self._clients.values()):
            self._all_left = True
            for other in self._clients.values():
                self._post(other, {"op": "all left"})

    def _refuse_askers(self) -> None:
        for key, asked in list(self._asked.items()):
            for index, request in list(asked):
                if gone := self._gone_for_good(self._clients[index]):
                    self._refuse(self._clients[index], request, gone)
                    asked.remove((index, request))
            if not asked:
                del self._asked[key]

    def _tick(self) -> None:
        now = time.monotonic()
        passed = now - self._ticked
        if passed < _TICK_SECONDS:
            return
        self._ticked = now
        for client in self._clients.values():
            if passed > _STOPPED_SECONDS:
                client.heard = now  # it was this process that was stopped
            # Not to one that does not read: pings would pile up in memory.
            if client.end is None and not client.outgoing:
                self._post(client, {"op": "ping"})
            silent = now - client.heard
            if client.index and client.end is None and silent > self._silence_seconds:
                self._ended(client, "silent", f"{silent:.0f}")

    def _post(self, client: _Client, message: Message) -> None:
        try:
            client.outgoing += client.channel.packed(message)
        except ValueError as error:  # what all said, together, is too large
            refused = {"id": message["id"], "refused": str(error)}
            client.outgoing += client.channel.packed(refused)
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        # Who has hung up stays a client, and would be told what all are told.
        if client.sock.fileno() < 0:
            client.outgoing.clear()
            return
        try:
            while client.outgoing:
                del client.outgoing[: client.sock.send(client.outgoing)]
        except BlockingIOError:
            pass  # the selector tells when there is room for the rest
        except OSError:
            client.outgoing.clear()  # reading tells that it has hung up
        events = selectors.EVENT_READ
        if client.outgoing:
            events |= selectors.EVENT_WRITE
        if self._selector.get_key(client.sock).events != events:
            self._selector.modify(client.sock, events, client)


_ANSWER_SECONDS = 2.0  # for what process 0 can answer by itself
# Locks raise OverflowError beyond `threading.TIMEOUT_MAX`, 292 years on Linux and 49
# days on Windows; users give `math.inf`, too.
_LONGEST_SECONDS = 1e6


@final
class Board(AbstractBoard):
    """The board of a job of several processes; process 0 keeps it.

    Args:
      timeout_seconds: how long `get` and `gather` wait unless they are told.
      silence_seconds: a process that says nothing for so long counts as dead; by
        default a little longer than the other. The host of one that is only busy, or
        stopped, answers; one that does not is given up by the kernel after 20 s.

    Attributes:
      status: gives what other processes are told of this one, each second.
    """

    def __init__(
        self,
        meeting: Meeting,
        timeout_seconds: float = 300,
        silence_seconds: float | None = None,
    ) -> None:
        self.index = meeting.index
        self.members = meeting.members
        self.status: Callable[[], Status | None] = lambda: None
        self.departures: dict[int, Departure] = {}
        self._timeout_seconds = timeout_seconds
        # Later than any watchdog, whose report says more.
        self._silence_seconds = silence_seconds or timeout_seconds + 5
        self._hub: Hub | None = None
        self._connection = self._connected(meeting)
        self._requests = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._heard = time.monotonic()
        self._callbacks: list[Callable[[Departure], None]] = []
        self._news = threading.Condition(threading.RLock())
        self._all_left = threading.Event()
        self._is_closed = False
        self._is_over = False
        self._reader = threading.Thread(
            target=self._read, name="jaxstrategy-board", daemon=True
        )
        self._reader.start()

    def _connected(self, meeting: Meeting) -> Connection:
        if self.index:
            return meeting.connections[0]
        ours, hubs = map(Connection, socket.socketpair(), _channel.pair())
        self._hub = Hub({0: hubs, **meeting.connections}, self._silence_seconds)
        self._hub.start()
        return ours

    def put(self, key: str, value: Json) -> None:
        self._send({"op": "put", "key": key, "value": value})

    def get(self, key: str, timeout_seconds: float | None = None) -> Json:
        seconds = self._seconds(timeout_seconds)
        try:
            return self._answer({"op": "get", "key": key}, seconds)["value"]
        except TimeoutError:
            raise ClusterError(nobody_put(key, seconds)) from None

    def gather(
        self, key: str, value: Json, timeout_seconds: float | None = None
    ) -> list[Json]:
        seconds = self._seconds(timeout_seconds)
        message = {"op": "gather", "key": key, "value": value}
        is_patient = timeout_seconds is None
        try:
            return self._answer(message, seconds, is_patient)["value"]
        except TimeoutError as timeout:
            absent = [self.members[k] for k in timeout.args[0]]
            raise ClusterError(
                f"Waited {seconds:g} s in {key!r} for {listed(absent, 8)}. Each "
                "process must come here, in the same order; they may be busy or stuck "
                "elsewhere."
            ) from None

    def states(self) -> list[ProcessState]:
        try:
            rows = self._answer({"op": "states"}, _ANSWER_SECONDS)["value"]
        except TimeoutError:
            raise ClusterError(
                f"{self.members[0]}, which knows where all are, has not answered for "
                f"{self.silent_seconds:.1f} s. It is stopped, or its host is."
            ) from None
        return self._states(rows)

    def known_states(self) -> list[ProcessState]:
        return [] if self._hub is None else self._states(self._hub.states())

    def _states(self, rows: list[Message]) -> list[ProcessState]:
        return [
            ProcessState(member, row["status"], row["end"], row["silent"], row["text"])
            for member, row in zip(self.members, rows, strict=True)
        ]

    def on_departure(self, callback: Callable[[Departure], None]) -> None:
        with self._news:
            self._callbacks.append(callback)
            known = list(self.departures.values())
        for departure in known:
            callback(departure)

    @property
    def silent_seconds(self) -> float:
        """For how long process 0 has said nothing; 1 at most is usual."""
        return time.monotonic() - self._heard

    def forgive_silence(self) -> None:
        """Count the silence of process 0 from now: this one was itself stopped."""
        self._heard = time.monotonic()

    @property
    def process_0_is_silent(self) -> bool:
        """Whether process 0 has said nothing for so long that it counts as dead."""
        return bool(self.index) and self.silent_seconds > self._silence_seconds

    def look_at_process_0(self) -> None:
        """Note that process 0 has ended if it has been silent for too long."""
        if self.process_0_is_silent:
            silent = f"{self.silent_seconds:.0f}"
            self._note(Departure(self.members[0], "silent", silent))

    def wait_for_departure(self, timeout_seconds: float) -> Departure | None:
        """The first process that ended badly, None if none did within the time."""
        with self._news:
            self._news.wait_for(self._bad, timeout_seconds)
            return self._bad()

    def _bad(self) -> Departure | None:
        ended = list(self.departures.values())
        return next((d for d in ended if d.end != "left"), None)

    def fail(self, text: str, linger_seconds: float | None = None) -> None:
        """Tell all others that this process ends, and why; they end as well.

        Process 0 stays until the others have hung up, or so long, by default 2 s: JAX
        aborts them when it has ended.
        """
        try:
            self._connection.send({"op": "failed", "text": text})
        except OSError:
            pass  # they know
        # The reader may itself be about to end the process, and wait for this call:
        # who waited for it would outlive process 0, and be aborted by JAX.
        self._hang_up(linger_seconds or _ANSWER_SECONDS)

    def leave(self, status: Status | None = None) -> None:
        """Say that this process has finished, before it waits for all others to."""
        self._send({"op": "left", "status": status})

    def wait_for_all_left(self, timeout_seconds: float | None = None) -> bool:
        """Whether all processes have left within the time."""
        return self._all_left.wait(timeout_seconds)

    def close(self) -> None:
        """Hang up. Others call it a death unless this process has left or failed."""
        self._hang_up(_ANSWER_SECONDS)
        if threading.current_thread() is not self._reader:
            self._reader.join(_ANSWER_SECONDS)

    def _hang_up(self, linger_seconds: float) -> None:
        self._is_closed = True
        self._connection.close()
        if self._hub:  # it goes on until the others have hung up
            self._hub.join(linger_seconds)

    def close_in_forked_child(self) -> None:
        """Give up a child's copies, which would keep a dead parent's lines open."""
        self._is_closed = True
        self._connection.sock.close()
        if self._hub:
            self._hub.close_in_forked_child()

    def _seconds(self, given: float | None) -> float:
        return min(_LONGEST_SECONDS, self._timeout_seconds if given is None else given)

    def _send(self, message: Message) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise ClusterError(f"The board is lost: {self._lost()}.") from error

    def _lost(self) -> str:
        if self._is_closed:
            return "this process has left the job"
        gone = self.departures.get(0) or Departure(self.members[0], "died")
        return f"{gone}. The job cannot go on"

    def _answer(
        self, message: Message, seconds: float, is_patient: bool = False
    ) -> Message:
        """Send a request to process 0 and wait for its answer.

        Args:
          is_patient: whether to wait on while another process is busy by itself.

        Raises:
          TimeoutError: too late; its argument has those that have not contributed.
          ClusterError: the answer cannot come.
        """
        request, answers = next(self._requests), queue.SimpleQueue()
        self._answers[request] = answers
        try:
            self._send({**message, "id": request})
            # The reader may have ended: it refuses only the requests that it found.
            if self._is_over:
                answers.put({"gone": []})
            while (answer := _first(answers, seconds)) is None:
                if not (is_patient and self._any_is_busy()):
                    raise TimeoutError(self._cancelled(message, request))
        finally:
            del self._answers[request]
        what = message.get("key", message["op"])
        if "refused" in answer:
            raise ClusterError(f"{what!r} cannot be answered: {answer['refused']}")
        if "gone" in answer:
            ended = [Departure(self.members[k], *end) for k, *end in answer["gone"]]
            told = "; ".join(map(str, ended)) or self._lost()
            raise ClusterError(f"Waited in {what!r}, but {told}.")
        return answer

    def _any_is_busy(self) -> bool:
        try:
            return any(state.busy is not None for state in self.states())
        except ClusterError:  # nobody is known to be busy: it does not wait on
            return False

    def _cancelled(self, message: Message, request: int) -> list[int]:
        if message["op"] not in ("gather", "get"):
            return []
        try:
            cancel = {"op": "cancel", "cancelled": request, "key": message["key"]}
            return self._answer({**cancel}, _ANSWER_SECONDS)["value"]
        except TimeoutError:
            return [0]  # which keeps the board, and does not answer

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.receive()
                if not is_reply(message, len(self.members)):
                    raise ValueError("process 0 says something else")
                self._heard = time.monotonic()
                self._take(message)
        except (EOFError, OSError, ValueError) as error:
            if not self._is_closed and not self._all_left.is_set():
                self._note(_lost_by(error, self.members[0]))
            self._is_over = True
            for answers in list(self._answers.values()):
                answers.put({"gone": []})

    def _take(self, message: Message) -> None:
        if "id" in message:
            answers = self._answers.get(message["id"])
            # None: the answer to a request that was given up meanwhile.
            if answers is not None:
                answers.put(message)
            return
        match message["op"]:
            case "ping":
                # After an error, what process 0 said last is still to be read.
                with contextlib.suppress(OSError):
                    self._connection.send({"op": "alive", "status": self.status()})
            case "ended":
                member = self.members[message["process"]]
                end, text, status = (message[k] for k in ("end", "text", "status"))
                self._note(Departure(member, end, text, status))
            case "all left":
                self._all_left.set()

    def _note(self, departure: Departure) -> None:
        """Note that a process has ended, and say so."""
        index = departure.member.index
        with self._news:
            known = self.departures.get(index)
            # Who has left waits for the others and may still die; other ends are final.
            if known and (known.end != "left" or departure.end == "left"):
                return
            self.departures[index] = departure
            callbacks = list(self._callbacks)
            self._news.notify_all()
        # Without the lock: one may wait for the main thread, which waits for news.
        for callback in callbacks:
            callback(departure)


def _lost_by(error: Exception, process_0: Member) -> Departure:
    if isinstance(error, ValueError):
        told = f"its messages make no sense: {error}"
        return Departure(process_0, "failed", told)
    return Departure(process_0, "died")


def _first(answers: queue.SimpleQueue[Message], seconds: float) -> Message | None:
    try:
        return answers.get(timeout=max(0.0, seconds))
    except queue.Empty:
        return None
