"""Values that all processes share, and news of those that have ended.

Process 0 keeps them. It brings together what all contribute, and knows at once when a
process has died: the kernel closes the connections of a process that ends, however it
ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias, TypedDict, final

from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.processes.messages import Buffer, LostError, RemoteError, Request
from jaxstrategy._src.processes.rendezvous import (
    Group,
    Host,
    Json,
    Member,
    Message,
    read,
    written,
)
from jaxstrategy._src.text import listed


class Status(TypedDict):
    """The progress of a process, as its watchdog reports it each second."""

    step: int  # the number of steps it has begun
    what: str  # the last of them in words
    pending: str | None  # the step or event it waits for
    seconds: float | None  # of waiting, or since there was progress
    busy: str | None  # its own work meanwhile, such as compiling
    writes: str | None  # the checkpoint it writes in the background
    # Batches that its input pipeline has not delivered, with the seconds so far.
    reads: list[tuple[str, float]]
    # Its last steps: number, comparisons before it, seconds since the last of them.
    arrivals: list[tuple[int, int, float]]


LATE_SECONDS = 3.0
"""Processes report each second; one that is late by so much is reported as silent."""


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """The state of a process. Of one that has ended it prints as a clause about it."""

    member: Member
    status: Status | None  # what its watchdog last said
    # None while it runs; `"left"` (its script has ended), `"failed"` (by an exception,
    # told in `text`), `"died"` (its connection broke), `"silent"` (it does not answer).
    end: str | None
    silent_seconds: float = 0.0  # about 1 at most is usual
    text: str = ""

    @property
    def busy(self) -> str | None:
        """Its own work, for which others may wait; None if it has none."""
        return self._replies["busy"] if self._replies else None

    @property
    def writes(self) -> str | None:
        """The checkpoint it writes in the background; None if it writes none."""
        return self._replies["writes"] if self._replies else None

    @property
    def _replies(self) -> Status | None:
        """Its last status if it runs and answers, else None."""
        is_recent = self.end is None and self.silent_seconds < LATE_SECONDS
        return self.status if is_recent else None

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


_TICK_SECONDS = 1.0
# A thread that should run each second and did not for so long was stopped itself.
_STOPPED_SECONDS = 5.0
_ANSWER_SECONDS = 2.0  # for what process 0 can answer by itself
# Locks raise OverflowError beyond `threading.TIMEOUT_MAX`, 292 years on Linux and 49
# days on Windows; users give `math.inf`, too.
_LONGEST_SECONDS = 1e6

Reply: TypeAlias = Callable[[bytes], None]
"""Answers a request, by a message that was written."""


@dataclasses.dataclass(eq=False)
class _Process:
    """A process, as process 0 sees it; `post` tells it something."""

    index: int
    post: Callable[[bytes], None]
    heard: float = dataclasses.field(default_factory=time.monotonic)
    status: Status | None = None
    end: str | None = None
    text: str = ""
    is_connected: bool = True

    @property
    def silent_seconds(self) -> float:
        is_asked = self.index != 0 and self.end is None
        return round(time.monotonic() - self.heard, 1) if is_asked else 0.0

    def told(self) -> Message:
        """Its `ProcessState`, of the process with this index."""
        state = {"process": self.index, "status": self.status, "end": self.end}
        return {**state, "silent_seconds": self.silent_seconds, "text": self.text}


@dataclasses.dataclass(eq=False)
class _Pending:
    """A `get` or `gather` that cannot be answered yet."""

    op: str
    process: _Process
    number: int  # of the request
    value: Json  # that it contributes
    reply: Reply


class _Keeper:
    """Process 0's end of a store: serves all processes until they have hung up.

    Its state belongs to the loop of messages, which no Ctrl-C and no signal interrupts;
    in a job of one process to who asks. Only `states` is called by others.
    """

    def __init__(
        self, group: Group | None, post: Callable[[bytes], None], silence_seconds: float
    ) -> None:
        self._silence_seconds = silence_seconds
        self._processes = {0: _Process(0, post)}
        self._by_peer: dict[bytes, _Process] = {}
        self._values: dict[str, Json] = {}
        self._pending: dict[str, list[_Pending]] = {}  # by key, in order
        self._ticked = time.monotonic()
        self._all_left = False
        self._is_over = threading.Event()
        self._lock = threading.RLock()
        self._call: Callable[[Callable[[], None]], None] = self._called
        if group is not None and (host := group.host) is not None:
            self._call = host.server.call
            for index, peer in sorted(host.peers.items()):
                one = _Process(index, functools.partial(host.server.send, peer))
                self._processes[index] = self._by_peer[peer] = one
            host.begin(self._received, self._lost)
            ticks = threading.Thread(target=self._tick_on, args=(host,), daemon=True)
            ticks.name = "jaxstrategy-store-ticks"
            ticks.start()

    def ask(self, body: bytes) -> Future[list[Buffer]]:
        """The answer to a request of process 0 itself."""
        future: Future[list[Buffer]] = Future()
        own, message = self._processes[0], read([body])
        self._call(lambda: self._obey(own, message, lambda b: future.set_result([b])))
        return future

    def hang_up(self, timeout_seconds: float) -> None:
        """Take part no more, and serve the others until they hang up or so long."""
        self._call(lambda: self._hung_up(self._processes[0]))
        self._is_over.wait(timeout_seconds)

    def _called(self, function: Callable[[], None]) -> None:
        with self._lock:
            function()

    def states(self) -> list[Message]:
        """The state of each process, by their ids; any thread may ask."""
        return [process.told() for process in self._processes.values()]

    def _received(self, request: Request) -> None:
        process = self._by_peer.get(request.peer)
        if process is None:
            raise ValueError("the processes of the job have met already")
        process.heard = time.monotonic()
        try:
            self._obey(process, read(request.frames), request.reply)
        # It is of the job, and yet says something that makes no sense.
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as why:
            if not self._all_left:
                text = f"its messages make no sense: {type(why).__name__}: {why}"
                self._ended(process, "failed", text)
            self._hung_up(process)
            request.fail(str(why))

    def _lost(self, peer: bytes) -> None:
        if (process := self._by_peer.pop(peer, None)) is not None:
            self._hung_up(process)

    def _obey(self, process: _Process, message: Message, reply: Reply) -> None:
        match message["op"]:
            case "alive":
                process.status = _checked(message["status"])
            case "put":
                self._values[message["key"]] = message["value"]
                self._settle(message["key"])
            case "get" | "gather" as op:
                key, value = message["key"], message.get("value")
                entry = _Pending(op, process, int(message["id"]), value, reply)
                self._pending.setdefault(key, []).append(entry)
                self._settle(key)
            case "cancel":
                reply(written({"value": self._cancel(process, message["cancelled"])}))
            case "states":
                reply(written({"value": self.states()}))
            case "failed":
                self._ended(process, "failed", str(message["text"]))
                reply(written({"value": None}))
            case "left":
                process.status = _checked(message["status"])
                self._ended(process, "left", "")
            case other:
                raise ValueError(f"{other!r} is no request")

    def _settle(self, key: str) -> None:
        """Answer what waits under a key, if it can be now, or never will be."""
        pending = self._pending.pop(key, [])
        first: dict[int, _Pending] = {}  # that each process contributes
        for each in pending:
            if each.op == "gather":
                first.setdefault(each.process.index, each)
        absent = [p for k, p in self._processes.items() if k not in first]
        if not absent:
            try:
                answer = written({"value": [first[k].value for k in self._processes]})
            except ValueError as error:  # what all said, together, is too large
                answer = written({"refused": str(error)})
            for each in first.values():
                each.reply(answer)
                pending.remove(each)
        for each in pending:
            gone = [process for process in absent if process.end]
            if each.op == "get":
                if key in self._values:
                    each.reply(written({"value": self._values[key]}))
                    continue
                gone = self._gone_for_good(each.process)
            if gone:
                each.reply(written({"gone": [process.told() for process in gone]}))
            else:
                self._pending.setdefault(key, []).append(each)

    def _gone_for_good(self, process: _Process) -> list[_Process]:
        """The processes whose end means that nothing will be put any more."""
        others = [other for other in self._processes.values() if other is not process]
        ended = [other for other in others if other.end not in (None, "left")]
        return ended or (others if all(other.end for other in others) else [])

    def _cancel(self, process: _Process, number: int) -> list[int]:
        """Forget a request that took too long; who has not contributed."""
        for key, pending in self._pending.items():
            for each in pending:
                if each.process is process and each.number == number:
                    here = {e.process.index for e in pending if e.op == "gather"}
                    self._pending[key] = [e for e in pending if e is not each]
                    return [k for k in self._processes if k not in here]
        return []

    def _hung_up(self, process: _Process) -> None:
        process.is_connected = False
        if process.end is None or (process.end == "left" and not self._all_left):
            self._ended(process, "died", "")
        if not any(other.is_connected for other in self._processes.values()):
            self._is_over.set()

    def _ended(self, process: _Process, end: str, text: str) -> None:
        # Who has left waits for the others and may still die; other ends are final.
        if process.end is not None and (process.end != "left" or end == "left"):
            return
        process.end, process.text = end, text
        told = written({"op": "ended", **process.told()})
        for other in self._processes.values():
            if other is not process:
                other.post(told)
        for key in list(self._pending):
            self._settle(key)
        if all(other.end == "left" for other in self._processes.values()):
            self._all_left = True
            for other in self._processes.values():
                other.post(written({"op": "all left"}))

    def _tick_on(self, host: Host) -> None:
        while not self._is_over.wait(_TICK_SECONDS):
            self._call(self._tick)
        host.close()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked > _STOPPED_SECONDS:  # this process was itself stopped
            for process in self._processes.values():
                process.heard = now
        self._ticked = now
        for process in self._processes.values():
            process.post(written({"op": "ping"}))
            silent = process.silent_seconds
            if process.end is None and silent > self._silence_seconds:
                self._ended(process, "silent", f"{silent:.0f}")


def _checked(status: Json) -> Status | None:
    """A status, if it looks like one."""
    if status is not None and not status.keys() >= Status.__annotations__.keys():
        raise ValueError("its status is none")
    return status


@final
class Store:
    """Values that all processes share, and news of those that have ended.

    Process 0 keeps it. All methods may be called from any thread. Values are what JSON
    can say.
    """

    # The text of an error that each process was given, by which each may end.
    common_error: str | None = None

    def __init__(
        self,
        group: Group | None = None,  # of a job of several processes
        timeout_seconds: float = 300,  # of `get` and `gather`
        # After so long a process that says nothing counts as dead. The host of one that
        # is busy or stopped answers; others the kernel gives up after 20 s.
        silence_seconds: float | None = None,
    ) -> None:
        self.index = 0  # of this process
        self.members = (Member(0, socket.gethostname(), os.getpid()),)  # by their ids
        self.departures: dict[int, ProcessState] = {}  # that have ended, by their ids
        # What other processes are told of this one, each second.
        self.status: Callable[[], Status | None] = lambda: None
        self._group = group
        self._news: queue.SimpleQueue[list[Buffer] | None] = queue.SimpleQueue()
        self._timeout_seconds = timeout_seconds
        # Later than any watchdog, whose report says more.
        self._silence_seconds = silence_seconds or timeout_seconds + 5
        self._requests = itertools.count()
        self._heard = time.monotonic()
        self._callbacks: list[Callable[[ProcessState], None]] = []
        self._changed = threading.Condition(threading.RLock())
        self._all_left = threading.Event()
        self._is_closed = False
        self._server = None
        if group is not None:
            self.index, self.members, self._news = (
                group.index,
                group.members,
                group.news,
            )
        if group is not None and group.client is not None:
            self._ask, self._tell = group.client.submit, group.client.send
        else:
            self._server = _Keeper(
                group, lambda body: self._news.put([body]), self._silence_seconds
            )
            self._ask = self._tell = self._server.ask
        if group is not None:
            # Callbacks may wait for long, which the loop of messages must not.
            threading.Thread(
                target=self._read, name="jaxstrategy-store", daemon=True
            ).start()

    def put(self, key: str, value: Json) -> None:
        """Let all processes `get` a value; a second one replaces the first."""
        self._send({"op": "put", "key": key, "value": value})

    def get(self, key: str, timeout_seconds: float | None = None) -> Json:
        """The value that some process has put or will put within the time."""
        seconds = self._seconds(timeout_seconds)
        try:
            return self._answer({"op": "get", "key": key}, seconds)["value"]
        except TimeoutError:
            raise ClusterError(
                f"Nobody has put {key!r} in the key-value store within {seconds:g} s."
            ) from None

    def gather(
        self, key: str, value: Json, timeout_seconds: float | None = None
    ) -> list[Json]:
        """Contribute a value; get those of all processes, in the order of their ids.

        The n-th call with a key on one process meets the n-th on each other. Without a
        time of its own it waits the store's, and longer while a process is busy.
        """
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
        """The state of each process, by their ids."""
        try:
            rows = self._answer({"op": "states"}, _ANSWER_SECONDS)["value"]
        except TimeoutError:
            raise ClusterError(
                f"{self.members[0]}, which knows where all are, has not answered for "
                f"{time.monotonic() - self._heard:.1f} s. It is stopped, or its host "
                "is."
            ) from None
        return list(map(self._state, rows))

    def known_states(self) -> list[ProcessState]:
        """The same without a message: in process 0; else empty."""
        return (
            []
            if self._server is None
            else list(map(self._state, self._server.states()))
        )

    def on_departure(self, callback: Callable[[ProcessState], None]) -> None:
        """Have a function called, on another thread, for each process that ends.

        Those that have ended already are told at once.
        """
        with self._changed:
            self._callbacks.append(callback)
            known = list(self.departures.values())
        for departure in known:
            callback(departure)

    def wait_for_departure(self, timeout_seconds: float) -> ProcessState | None:
        """The first process that ended badly, None if none did within the time."""

        def bad() -> ProcessState | None:
            ended = list(self.departures.values())
            return next((state for state in ended if state.end != "left"), None)

        with self._changed:
            return self._changed.wait_for(bad, timeout_seconds)

    def look_at_process_0(self) -> None:
        """Note that process 0 has ended if it has been silent for too long."""
        seconds = time.monotonic() - self._heard
        if self.index and seconds > self._silence_seconds:
            zero = self.members[0]
            self._note(ProcessState(zero, None, "silent", seconds, f"{seconds:.0f}"))

    def forgive_silence(self) -> None:
        """Count the silence of process 0 from now: this one was itself stopped."""
        self._heard = time.monotonic()

    def fail(self, text: str, linger_seconds: float | None = None) -> None:
        """Tell all others that this process ends, and why; they end as well.

        Process 0 stays until the others have hung up, or so long, by default 2 s: JAX
        aborts them when it has ended.
        """
        # An answer, because the process may end before what is only sent is out.
        with contextlib.suppress(ClusterError, TimeoutError):
            self._answer({"op": "failed", "text": text}, _ANSWER_SECONDS)
        self.close(linger_seconds or _ANSWER_SECONDS)

    def leave(self, status: Status | None = None) -> None:
        """Say that this process has finished, before it waits for all others to."""
        self._send({"op": "left", "status": status})

    def wait_for_all_left(self, timeout_seconds: float | None = None) -> bool:
        """Whether all processes have left within the time."""
        return self._all_left.wait(timeout_seconds)

    def close(self, linger_seconds: float = _ANSWER_SECONDS) -> None:
        """Hang up. Others call it a death unless this process has left or failed.

        Process 0 goes on for so long until the others have hung up.
        """
        self._is_closed = True
        if self._server is not None:
            self._server.hang_up(linger_seconds)
        elif self._group is not None and self._group.client is not None:
            self._group.client.close(linger_seconds)
        self._news.put(None)

    def close_in_forked_child(self) -> None:
        """A child is no process of the job; it has no connections either."""
        self._is_closed = True

    def _seconds(self, given: float | None) -> float:
        return min(_LONGEST_SECONDS, self._timeout_seconds if given is None else given)

    def _send(self, message: Message) -> None:
        body = written(message)
        try:
            if self._is_closed:
                raise LostError
            self._tell(body)
        except LostError as error:
            raise ClusterError(
                f"The key-value store is lost: {self._lost()}."
            ) from error

    def _lost(self) -> str:
        if self._is_closed:
            return "this process has left the job"
        gone = self.departures.get(0) or ProcessState(self.members[0], None, "died")
        return f"{gone}. The job cannot go on"

    def _answer(
        self, message: Message, seconds: float, is_patient: bool = False
    ) -> Message:
        """Send a request to process 0 and wait for its answer."""
        number, op = next(self._requests), message["op"]
        what = message.get("key", op)
        if self._is_closed:
            raise ClusterError(f"Waited in {what!r}, but {self._lost()}.")
        future = self._ask(written({**message, "id": number}))
        while True:
            try:
                answer = read(future.result(max(0.0, seconds)))
                break
            except TimeoutError:
                if is_patient and self._any_is_busy():
                    continue
                absent = []
                if op in ("gather", "get"):
                    cancel = {"op": "cancel", "cancelled": number}
                    try:
                        absent = self._answer(cancel, _ANSWER_SECONDS)["value"]
                    except TimeoutError:
                        absent = [0]  # which keeps the store, and does not answer
                raise TimeoutError(absent) from None
            except (LostError, RemoteError):
                answer = {"gone": []}
                break
        if "refused" in answer:
            raise ClusterError(f"{what!r} cannot be answered: {answer['refused']}")
        if "gone" in answer:
            told = "; ".join(str(self._state(row)) for row in answer["gone"])
            raise ClusterError(f"Waited in {what!r}, but {told or self._lost()}.")
        return answer

    def _any_is_busy(self) -> bool:
        try:
            return any(state.busy is not None for state in self.states())
        except ClusterError:  # nobody is known to be busy: it does not wait on
            return False

    def _state(self, row: Message) -> ProcessState:
        member = self.members[row["process"]]
        fields = ("status", "end", "silent_seconds", "text")
        return ProcessState(member, **{name: row[name] for name in fields})

    def _read(self) -> None:
        """Take what process 0 tells, in a thread that may be held up."""
        while (frames := self._news.get()) is not None:
            self._heard = time.monotonic()
            try:
                self._take(read(frames))
            except (LookupError, RecursionError, TypeError, ValueError) as error:
                told = f"its messages make no sense: {error}"
                self._note(ProcessState(self.members[0], None, "failed", text=told))
        if not self._is_closed and not self._all_left.is_set():
            self._note(ProcessState(self.members[0], None, "died"))

    def _take(self, message: Message) -> None:
        match message["op"]:
            case "ping":
                # After an error, what process 0 said last is still to be read.
                with contextlib.suppress(ClusterError):
                    self._send({"op": "alive", "status": self.status()})
            case "ended":
                self._note(self._state(message))
            case "all left":
                self._all_left.set()

    def _note(self, departure: ProcessState) -> None:
        """Note that a process has ended, and say so."""
        index = departure.member.index
        with self._changed:
            known = self.departures.get(index)
            # Who has left waits for the others and may still die; other ends are final.
            if known and (known.end != "left" or departure.end == "left"):
                return
            self.departures[index] = departure
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        # Without the lock: one may wait for the main thread, which waits for news.
        for callback in callbacks:
            callback(departure)
