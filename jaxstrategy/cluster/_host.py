"""The meeting of all processes, as process 0 leads it."""

from __future__ import annotations

import collections
import contextlib
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster import _wire
from jaxstrategy.cluster._member import GREETING, SAME, Meeting, Member, member
from jaxstrategy.cluster._wire import Connection

# After the first mistake, how long those are waited for that shall hear of it too.
_GRACE_SECONDS = 2.0


class _Caller:
    """Someone who has connected to process 0."""

    def __init__(self, sock: socket.socket) -> None:
        self.connection = Connection(sock)
        self.was_greeted = False
        self.hello: dict[str, Any] | None = None

    def read(self) -> bool:
        """Take in what was sent; False when it is none of us, or has gone."""
        try:
            self.connection.fill()
            if not self.was_greeted:
                begins = self.connection.inbox.starts_with(GREETING)
                if begins is None:
                    return True
                if not begins:
                    return False
                self.connection.inbox.drop(len(GREETING))
                self.was_greeted = True
            for message in self.connection.inbox.messages():
                if not _is_hello(message):
                    return False
                self.hello = message
        except (OSError, EOFError, ValueError):
            return False
        return True

    def tell(self, message: dict[str, Any]) -> None:
        try:
            self.connection.send(message)
        except OSError:
            pass  # its own deadline tells it


class Host:
    """The meeting, as process 0 leads it."""

    def __init__(
        self,
        listener: socket.socket,
        hello: dict[str, Any],
        coordinator: str,
        end: float,
        timeout_seconds: float,
    ) -> None:
        self._listener = listener
        self._own = hello
        self._coordinator = coordinator
        self._end = end
        self._timeout_seconds = timeout_seconds
        self._selector = selectors.DefaultSelector()
        self._callers: list[_Caller] = []
        self._gone: list[dict[str, Any]] = []

    def meet(self) -> Meeting:
        """Wait for all, and tell them the verdict; raises as `_rendezvous.meet`."""
        with contextlib.ExitStack() as unless_met:
            unless_met.callback(self._close)
            with self._selector:
                self._selector.register(self._listener, selectors.EVENT_READ)
                self._wait()
            wrong = self._mistakes() or self._missing()
            if wrong:
                text = self._text(wrong)
                self._tell({"verdict": text})
                raise ClusterError(text)
            unless_met.pop_all()
        members = [member(hello) for hello in self._hellos()]
        members.sort(key=lambda one: one.index)
        self._tell({"verdict": "", "members": [list(_row(m)) for m in members]})
        connections = {c.hello["index"]: c.connection for c in self._present()}
        for caller in self._callers:
            if caller.hello is None:
                caller.connection.close()  # a stranger
        for connection in connections.values():
            connection.sock.settimeout(None)
        return Meeting(0, tuple(members), connections)

    def _wait(self) -> None:
        """Until all have come, the time is over, or a mistake is known to most."""
        end = self._end
        while (now := time.monotonic()) < end:
            if len(self._hellos()) >= self._own["count"] and not self._mistakes():
                return
            for key, _ in self._selector.select(min(end - now, 0.5)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            if self._mistakes():
                end = min(end, time.monotonic() + _GRACE_SECONDS)
                self._end = end

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it has hung up already
        sock.settimeout(1)
        _wire.tune(sock)
        caller = _Caller(sock)
        self._callers.append(caller)
        self._selector.register(sock, selectors.EVENT_READ, caller)

    def _read(self, caller: _Caller) -> None:
        had_said = caller.hello is not None
        if not caller.read():
            if caller.hello is not None:
                self._gone.append(caller.hello)
            self._drop(caller)
        elif caller.hello is not None and not had_said:
            self._welcome(caller, caller.hello)

    def _welcome(self, caller: _Caller, hello: dict[str, Any]) -> None:
        try:
            caller.connection.sock.sendall(GREETING)
        except OSError:
            return
        if hello.get("job", "") != self._own.get("job", ""):
            caller.tell(
                {
                    "verdict": (
                        f"{member(hello)} belongs to job {hello.get('job')!r}, but "
                        f"{member(self._own)} at {self._coordinator} to job "
                        f"{self._own.get('job')!r}. Give each job a port of its own."
                    )
                }
            )
            self._drop(caller)
            return
        caller.tell({"seconds": max(0.0, self._end - time.monotonic())})

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection.sock)
        self._callers.remove(caller)
        caller.connection.close()

    def _present(self) -> list[Any]:
        return [caller for caller in self._callers if caller.hello is not None]

    def _hellos(self) -> list[dict[str, Any]]:
        return [self._own, *(caller.hello for caller in self._present())]

    def _mistakes(self) -> list[str]:
        return mistakes(self._own, self._hellos())

    def _missing(self) -> list[str]:
        count = self._own["count"]
        missing = sorted(set(range(count)) - {h["index"] for h in self._hellos()})
        if not missing:
            return []
        came = f"{count - len(missing)} of {count} processes came"
        wrong = [
            f"{came} within {self._timeout_seconds:g} s; {_named(missing)} did not"
        ]
        wrong += [
            f"{member(hello)} came, and ended before all were there"
            for hello in self._gone
            if hello["index"] in missing
        ]
        return wrong

    def _text(self, wrong: Sequence[str]) -> str:
        return (
            f"The {self._own['count']} processes of the job at {self._coordinator} "
            f"could not start together: {'; '.join(wrong)}."
        )

    def _tell(self, message: dict[str, Any]) -> None:
        for caller in self._present():
            caller.tell(message)

    def _close(self) -> None:
        for caller in self._callers:
            caller.connection.close()


def mistakes(own: Mapping[str, Any], hellos: Sequence[Mapping[str, Any]]) -> list[str]:
    """What cannot be right, whoever is still to come.

    Args:
      own: what process 0 says of itself.
      hellos: what all say that have come, process 0 among them.
    """
    count, wrong = own["count"], []
    others = [hello for hello in hellos if hello is not own]
    first = member(own)
    for hello in others:
        if hello["count"] != count:
            wrong.append(
                f"{member(hello)} was told that there are {hello['count']} processes, "
                f"{first} that there are {count}"
            )
        elif not 0 <= hello["index"] < count:
            wrong.append(
                f"{member(hello)} is out of range: the ids of {count} processes are "
                f"0 to {count - 1}"
            )
        wrong += _other_versions(own, hello)
    holders = collections.defaultdict(list)
    for hello in hellos:
        one = member(hello)
        holders[one.index].append(f"pid {one.pid} on host {one.host}")
    for index, held in sorted(holders.items()):
        if len(held) > 1:
            wrong.append(f"process id {index} was given to {' and to '.join(held)}")
    return wrong


def _other_versions(own: Mapping[str, Any], hello: Mapping[str, Any]) -> list[str]:
    ours, theirs = own.get("versions", {}), hello.get("versions", {})
    differ = [name for name in SAME if ours.get(name) != theirs.get(name)]
    if not differ:
        return []

    def listed(versions: Mapping[str, str]) -> str:
        return ", ".join(f"{name} {versions.get(name)}" for name in differ)

    return [f"{member(hello)} has {listed(theirs)}, {member(own)} {listed(ours)}"]


def _is_hello(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), int) for name in ("index", "count")
    )


def _row(one: Member) -> tuple[int, str, int]:
    return one.index, one.host, one.pid


def _named(indices: Sequence[int], most: int = 16) -> str:
    shown = ", ".join(map(str, indices[:most]))
    more = f" and {len(indices) - most} more" if len(indices) > most else ""
    return f"process{'es' if len(indices) > 1 else ''} {shown}{more}"
