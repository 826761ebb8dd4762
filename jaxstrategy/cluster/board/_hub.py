"""Process 0's end of the board: one thread that serves all processes.

It keeps values, brings together what all contribute, and knows at once when a process
has died: the kernel closes the connections of a process that ends, however it ends.
"""

from __future__ import annotations

import collections
import contextlib
import selectors
import threading
import time
from collections.abc import Mapping

from jaxstrategy.cluster.board._board_messages import Status, is_request
from jaxstrategy.cluster.connections._fields import Message
from jaxstrategy.cluster.connections._wire import Connection

_TICK_SECONDS = 1.0
# A thread that should run each second and did not for so long was stopped itself.
_STOPPED_SECONDS = 5.0


class _Line:
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
      lines: the connection to each process.
      silence_seconds: a process that says nothing for so long counts as dead.
    """

    def __init__(
        self,
        lines: Mapping[int, Connection],
        silence_seconds: float,
    ) -> None:
        self._lines = {k: _Line(k, lines[k]) for k in sorted(lines)}
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
        for line in self._lines.values():
            line.sock.setblocking(False)
            self._selector.register(line.sock, selectors.EVENT_READ, line)
        self._thread.start()

    def join(self, timeout_seconds: float) -> None:
        """Wait until all processes have hung up."""
        self._thread.join(timeout_seconds)

    def close_in_forked_child(self) -> None:
        """Close the child's copies and leave the parent's selector alone."""
        for line in self._lines.values():
            line.sock.close()

    def _serve(self) -> None:
        for line in self._lines.values():
            self._take(line)  # what came in before we began
        while self._selector.get_map():
            for key, events in self._selector.select(_TICK_SECONDS):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            self._tick()
        self._selector.close()

    def _read(self, line: _Line) -> None:
        try:
            received = line.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._hung_up(line)
            return
        line.channel.add(received)
        line.heard = time.monotonic()
        self._take(line)

    def _take(self, line: _Line) -> None:
        try:
            for message in line.channel.messages():
                if not is_request(message):
                    raise ValueError("it sent something that is no request")
                self._obey(line, message)
        except ValueError as error:
            if not self._all_left:
                self._ended(line, "failed", f"its messages make no sense: {error}")
            self._hung_up(line)

    def _obey(self, line: _Line, message: Message) -> None:
        match message["op"]:
            case "alive":
                line.status = message["status"]
            case "put":
                self._put(message["key"], message["value"])
            case "get":
                self._get(line, message)
            case "gather":
                entry = message["id"], message["value"]
                waiting = self._gathers.setdefault(message["key"], {})
                waiting.setdefault(line.index, collections.deque()).append(entry)
                self._complete(message["key"])
            case "cancel":
                self._cancel(line, message)
            case "states":
                self._post(line, {"id": message["id"], "value": self.states()})
            case "failed":
                self._ended(line, "failed", message["text"])
            case "left":
                line.status = message["status"]
                self._ended(line, "left", "")

    def _put(self, key: str, value: object) -> None:
        self._values[key] = value
        for index, request in self._asked.pop(key, []):
            self._post(self._lines[index], {"id": request, "value": value})

    def _get(self, line: _Line, message: Message) -> None:
        key = message["key"]
        if key in self._values:
            self._post(line, {"id": message["id"], "value": self._values[key]})
        elif gone := self._gone_for_good(line):
            self._refuse(line, message["id"], gone)
        else:
            self._asked.setdefault(key, []).append((line.index, message["id"]))

    def _gone_for_good(self, line: _Line) -> list[int]:
        """The processes whose end means that nothing will be put any more."""
        others = [other for other in self._lines.values() if other is not line]
        ended = [other.index for other in others if other.end not in (None, "left")]
        if not ended and all(other.end for other in others):
            ended = [other.index for other in others]
        return ended

    def _complete(self, key: str) -> None:
        """Answer a gather if all have contributed, or if somebody never will."""
        waiting = self._gathers[key]
        absent = [k for k in self._lines if not waiting.get(k)]
        if not absent:
            entries = {k: waiting[k].popleft() for k in self._lines}
            values = [value for _, value in entries.values()]
            for index, (request, _) in entries.items():
                self._post(self._lines[index], {"id": request, "value": values})
            if not any(waiting.values()):
                del self._gathers[key]
        elif gone := [k for k in absent if self._lines[k].end]:
            for index in waiting:
                for request, _ in waiting[index]:
                    self._refuse(self._lines[index], request, gone)
            del self._gathers[key]

    def _cancel(self, line: _Line, message: Message) -> None:
        """Forget a request that took too long; say who has not contributed."""
        request, absent = message["cancelled"], []
        for key, waiting in list(self._gathers.items()):
            entries = waiting.get(line.index, ())
            kept = collections.deque(e for e in entries if e[0] != request)
            if len(kept) < len(entries):
                absent = [k for k in self._lines if not waiting.get(k)]
                waiting[line.index] = kept
                if not any(waiting.values()):
                    del self._gathers[key]
        for asked in self._asked.values():
            with contextlib.suppress(ValueError):
                asked.remove((line.index, request))
        self._post(line, {"id": message["id"], "value": absent})

    def _refuse(self, line: _Line, request: int, gone: list[int]) -> None:
        ends = [[k, self._lines[k].end, self._lines[k].text] for k in gone]
        self._post(line, {"id": request, "gone": ends})

    def states(self) -> list[Message]:
        """The state of each process, by their ids; any thread may ask."""
        now = time.monotonic()
        return [
            {
                "status": line.status,
                "end": line.end,
                "text": line.text,
                "silent": self._silent(line, now),
            }
            for line in self._lines.values()
        ]

    def _silent(self, line: _Line, now: float) -> float:
        is_asked = line.index != 0 and line.end is None
        return round(now - line.heard, 1) if is_asked else 0.0

    def _hung_up(self, line: _Line) -> None:
        self._selector.unregister(line.sock)
        line.sock.close()
        if line.end is None or (line.end == "left" and not self._all_left):
            self._ended(line, "died", "")

    def _ended(self, line: _Line, end: str, text: str) -> None:
        if line.end is not None and (line.end != "left" or end == "left"):
            return
        line.end, line.text = end, text
        told = {
            "op": "ended",
            "process": line.index,
            "end": end,
            "text": text,
            "status": line.status,
        }
        for other in self._lines.values():
            if other is not line:
                self._post(other, told)
        for key in list(self._gathers):
            self._complete(key)
        self._refuse_askers()
        if all(other.end == "left" for other in self._lines.values()):
            self._all_left = True
            for other in self._lines.values():
                self._post(other, {"op": "all left"})

    def _refuse_askers(self) -> None:
        for key, asked in list(self._asked.items()):
            for index, request in list(asked):
                if gone := self._gone_for_good(self._lines[index]):
                    self._refuse(self._lines[index], request, gone)
                    asked.remove((index, request))
            if not asked:
                del self._asked[key]

    def _tick(self) -> None:
        now = time.monotonic()
        passed = now - self._ticked
        if passed < _TICK_SECONDS:
            return
        self._ticked = now
        for line in self._lines.values():
            if passed > _STOPPED_SECONDS:
                line.heard = now  # it was this process that was stopped
            if line.end is None and not line.outgoing:
                self._post(line, {"op": "ping"})
            silent = now - line.heard
            if line.index and line.end is None and silent > self._silence_seconds:
                self._ended(line, "silent", f"{silent:.0f}")

    def _post(self, line: _Line, message: Message) -> None:
        try:
            line.outgoing += line.channel.packed(message)
        except ValueError as error:  # what all said, together, is too large
            refused = {"id": message["id"], "refused": str(error)}
            line.outgoing += line.channel.packed(refused)
        self._flush(line)

    def _flush(self, line: _Line) -> None:
        if line.sock.fileno() < 0:
            line.outgoing.clear()
            return
        try:
            while line.outgoing:
                del line.outgoing[: line.sock.send(line.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            line.outgoing.clear()  # reading tells that it has hung up
        events = selectors.EVENT_READ
        if line.outgoing:
            events |= selectors.EVENT_WRITE
        if self._selector.get_key(line.sock).events != events:
            self._selector.modify(line.sock, events, line)
