"""The board of several processes, and the connection of each to process 0."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import final

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.board._board import (
    AbstractBoard,
    Departure,
    ProcessState,
    nobody_put,
)
from jaxstrategy.cluster.board._board_messages import Status, is_reply
from jaxstrategy.cluster.board._hub import Hub
from jaxstrategy.cluster.connections import (
    _channel,
)
from jaxstrategy.cluster.connections._fields import Json, Message
from jaxstrategy.cluster.connections._wire import Connection
from jaxstrategy.cluster.meeting._member import (
    Meeting,
    Member,
)
from jaxstrategy.text._lists import listed

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
