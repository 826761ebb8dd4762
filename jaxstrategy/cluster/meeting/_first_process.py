"""The meeting of all processes, as process 0 leads it."""

from __future__ import annotations

import collections
import contextlib
import errno
import selectors
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.connections import (
    _secret,
    _wire,
)
from jaxstrategy.cluster.connections._fields import Message
from jaxstrategy.cluster.connections._secret import Secret
from jaxstrategy.cluster.connections._wire import Connection
from jaxstrategy.cluster.meeting._caller import Caller
from jaxstrategy.cluster.meeting._member import (
    SAME,
    Meeting,
    Member,
    member,
)
from jaxstrategy.text._lists import listed
from jaxstrategy.text._units import plural

# After the first mistake the meeting waits so long for others, to tell them of it.
_GRACE_SECONDS = 2.0
_TICK_SECONDS = 0.5
# With more, the one that has been silent longest makes room: one of the job says who it
# is within milliseconds.
_MOST_STRANGERS = 256
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_ROOM_SECONDS = 0.1


class Host:
    """The meeting, as process 0 leads it: the host listens and decides.

    Args:
      listener: a socket that listens at the coordinator's address.
      hello: the facts that this process tells of itself.
      coordinator: the address, `host:port`.
      end: when to give up, of `time.monotonic()`.
      timeout_seconds: the time until then, for messages.
      secret: of the job.
    """

    def __init__(
        self,
        listener: socket.socket,
        hello: Message,
        coordinator: str,
        end: float,
        timeout_seconds: float,
        secret: Secret,
    ) -> None:
        self._listener = listener
        self._own = hello
        self._coordinator = coordinator
        self._end = end
        self._timeout_seconds = timeout_seconds
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._callers: list[Caller] = []
        self._gone: list[Message] = []
        self._refused = 0
        self._refused_last = "nobody"
        self._accepts_at: float | None = None  # None while it accepts

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
        connections = {
            hello["index"]: connection for hello, connection in self._present()
        }
        for stranger in self._strangers():
            stranger.close()
        for connection in connections.values():
            connection.sock.settimeout(None)
        return Meeting(0, tuple(members), connections)

    def _wait(self) -> None:
        """Until all have come, the time is over, or a mistake is known to most."""
        end = self._end
        while (now := time.monotonic()) < end:
            if len(self._hellos()) >= self._own["count"] and not self._mistakes():
                return
            self._accept_again(now)
            tick = _TICK_SECONDS if self._accepts_at is None else _NO_ROOM_SECONDS
            for key, _ in self._selector.select(min(end - now, tick)):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._callers:  # and was not dropped a moment ago
                    self._read(key.data)
            self._drop_late()
            if self._mistakes():
                end = min(end, time.monotonic() + _GRACE_SECONDS)
                self._end = end

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._make_room()
            return  # or it has hung up already
        # One thread serves all: a caller that does not read must not hold it up.
        sock.settimeout(1)
        _wire.tune(sock)
        caller = Caller(sock, self._secret)
        self._callers.append(caller)
        self._selector.register(sock, selectors.EVENT_READ, caller)
        if len(strangers := self._strangers()) > _MOST_STRANGERS:
            self._drop(strangers[0])

    def _make_room(self) -> None:
        """Hang up on the oldest stranger, or listen to no others for a moment."""
        if strangers := self._strangers():
            self._drop(strangers[0])
            return
        # The call that could not be accepted would wake the selector again and again.
        self._selector.unregister(self._listener)
        self._accepts_at = time.monotonic() + _NO_ROOM_SECONDS

    def _accept_again(self, now: float) -> None:
        if self._accepts_at is not None and now >= self._accepts_at:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepts_at = None

    def _drop_late(self) -> None:
        now = time.monotonic()
        for stranger in self._strangers():
            if now >= stranger.deadline:
                self._drop(stranger)

    def _read(self, caller: Caller) -> None:
        had_said = caller.hello is not None
        if not caller.read():
            if caller.hello is not None:
                self._gone.append(caller.hello)
            if caller.is_refused:
                self._note_refused(caller)
            self._drop(caller)
        elif caller.hello is not None and not had_said:
            self._welcome(caller, caller.hello)

    def _note_refused(self, caller: Caller) -> None:
        self._refused += 1
        with contextlib.suppress(OSError):
            self._refused_last = str(caller.sock.getpeername()[0])
        if self._refused == 1:  # and no more words: strangers may call often
            print(
                f"jaxstrategy: process 0 refused a caller from {self._refused_last}: "
                f"it has another {_secret.VARIABLE}, or none. The job waits on.",
                file=sys.stderr,
                flush=True,
            )

    def _welcome(self, caller: Caller, hello: Message) -> None:
        if hello.get("job", "") == self._own.get("job", ""):
            caller.tell({"seconds": max(0.0, self._end - time.monotonic())})
            return
        other = (
            f"{member(hello)} belongs to job {hello.get('job')!r}, but "
            f"{member(self._own)} at {self._coordinator} to job "
            f"{self._own.get('job')!r}. Give each job a port of its own."
        )
        caller.tell({"verdict": other})
        self._drop(caller)

    def _drop(self, caller: Caller) -> None:
        self._selector.unregister(caller.sock)
        self._callers.remove(caller)
        caller.close()

    def _strangers(self) -> list[Caller]:
        """Callers that have not said who they are, the oldest first."""
        return [caller for caller in self._callers if caller.hello is None]

    def _present(self) -> list[tuple[Message, Connection]]:
        return [
            (caller.hello, caller.connection)
            for caller in self._callers
            if caller.hello is not None and caller.connection is not None
        ]

    def _hellos(self) -> list[Message]:
        return [self._own, *(hello for hello, _ in self._present())]

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
        if self._refused:
            times = "once" if self._refused == 1 else f"{self._refused} times"
            wrong.append(
                f"callers with another {_secret.VARIABLE}, or none, were refused "
                f"{times}, the last one from {self._refused_last}"
            )
        return wrong

    def _text(self, wrong: Sequence[str]) -> str:
        return (
            f"The {self._own['count']} processes of the job at {self._coordinator} "
            f"could not start together: {'; '.join(wrong)}."
        )

    def _tell(self, message: Message) -> None:
        for caller in self._callers:
            if caller.hello is not None:
                caller.tell(message)

    def _close(self) -> None:
        for caller in self._callers:
            caller.close()


def mistakes(own: Message, hellos: Sequence[Message]) -> list[str]:
    """List the contradictions that no further process could resolve.

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


def _other_versions(own: Message, hello: Message) -> list[str]:
    ours, theirs = own.get("versions", {}), hello.get("versions", {})
    differ = [name for name in SAME if ours.get(name) != theirs.get(name)]
    if not differ:
        return []

    def listed(versions: Mapping[str, str]) -> str:
        return ", ".join(f"{name} {versions.get(name)}" for name in differ)

    return [f"{member(hello)} has {listed(theirs)}, {member(own)} {listed(ours)}"]


def _row(one: Member) -> tuple[int, str, int]:
    return one.index, one.host, one.pid


def _named(indices: Sequence[int]) -> str:
    return f"{plural(len(indices), 'process')} {listed(indices, 16)}"
