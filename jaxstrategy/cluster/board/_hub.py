"""Process 0's end of the board: one thread that serves all processes.

It keeps values, brings together what all contribute, and knows at once when a process
has died: the kernel closes the connections of a process that ends, however it ends.

All of its state belongs to that thread, so there is no lock; only `states`, which reads
one attribute after the other, is called by others. Nothing in it may block: a client
that does not read would stop the whole job.
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
