"""The rendezvous of a job's processes, before JAX is told of any of them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import os
import platform
import selectors
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TypeGuard, final

from jaxstrategy._errors import ClusterError
from jaxstrategy.processes import _channel, _secret
from jaxstrategy.processes._channel import (
    REFUSAL,
    Channel,
    Connection,
    Fields,
    ForgedError,
    Greeting,
    Message,
    RefusedError,
    has,
    is_name,
    is_seconds,
    is_text,
    is_whole,
    row,
    rows,
)
from jaxstrategy.processes._secret import Secret
from jaxstrategy.text._lists import listed
from jaxstrategy.text._units import plural


def _is_versions(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_name, value.values()))


_HELLO: Fields = {"index": is_whole, "count": is_whole}
_SAID_OF_ITSELF: Fields = {
    "host": is_name,
    "pid": is_whole,
    "job": is_name,
    "versions": _is_versions,
}
_VERDICT: Fields = {"verdict": is_text}
_MET: Fields = {**_VERDICT, "members": rows(row(is_whole, is_text, is_whole))}


def is_hello(message: object) -> TypeGuard[Message]:
    """Whether a process says so who it is."""
    return has(message, _HELLO) and all(
        name not in message or is_right(message[name])
        for name, is_right in _SAID_OF_ITSELF.items()
    )


def is_word(message: object, count: int) -> TypeGuard[Message]:
    """Whether process 0 says so how long to wait, or how the meeting ended.

    Args:
      count: how many processes there are.
    """
    if not has(message, _VERDICT):
        return has(message, {"seconds": is_seconds})
    if message["verdict"]:
        return True
    ids = list(range(count))
    return has(message, _MET) and [each[0] for each in message["members"]] == ids


HELLO_SECONDS = 5.0
"""The time that a stranger may stay connected."""


@final
class Caller:
    """Someone who has connected: a stranger until it proves to be one of the job.

    Attributes:
      hello: what it says of itself, None while it is a stranger.
      is_refused: whether it speaks our protocol and does not know the secret.
      deadline: when it is hung up on if it is a stranger still.
    """

    def __init__(self, sock: socket.socket, secret: Secret) -> None:
        self.sock = sock
        self.hello: Message | None = None
        self.is_refused = False
        self.deadline = time.monotonic() + HELLO_SECONDS
        self.connection: Connection | None = None
        self._greeting = Greeting(secret, is_host=True)

    def read(self) -> bool:
        """Take in what was sent; False when it is none of us, or has gone."""
        try:
            self._take(_channel.received(self.sock))
        except ForgedError:
            self._refuse()
            return False
        except (OSError, EOFError, ValueError):
            return False
        return True

    def _take(self, received: bytes) -> None:
        if self.connection is None:
            channel = self._greeting.add(received)
            if channel is None:
                return
            self.connection = Connection(self.sock, channel)
            self.sock.sendall(self._greeting.own)
        else:
            self.connection.channel.add(received)
        for message in self.connection.channel.messages():
            if self.hello is not None or not is_hello(message):
                raise ValueError("this is no hello")
            self.hello = message

    def _refuse(self) -> None:
        self.is_refused = self.hello is None
        try:
            self.sock.sendall(REFUSAL)
        except OSError:
            pass  # it is not waiting for it

    def tell(self, message: Message) -> None:
        """Say something to a process that has said who it is."""
        try:
            if self.connection is not None:
                self.connection.send(message)
        except OSError:
            pass  # its own deadline tells it

    def close(self) -> None:
        """Hang up."""
        if self.connection is not None:
            self.connection.close()
        self.sock.close()


SAME = ("jaxstrategy", "jax", "jaxlib")
"""Packages of which all processes must have the same version."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of the job; prints as `process 1 (host a, pid 17)`."""

    index: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The outcome of a meeting, in one process.

    Attributes:
      members: all processes, by their ids.
      connections: to the others, by their ids, on process 0; to process 0, elsewhere.
    """

    index: int
    members: tuple[Member, ...]
    connections: Mapping[int, Connection]

    def close(self) -> None:
        """Hang up."""
        for connection in self.connections.values():
            connection.close()


def facts() -> Message:
    """The facts that a process tells of itself: host, pid, versions."""
    versions = {name: _version(name) for name in SAME}
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("JAXSTRATEGY_JOB", ""),
        "versions": {**versions, "Python": platform.python_version()},
    }


def _version(name: str) -> str:
    try:
        # What runs from its source tree, and was not installed, has no metadata.
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def member(hello: Message) -> Member:
    """The process that says this."""
    return Member(hello["index"], hello.get("host", "?"), hello.get("pid", 0))


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
        _channel.tune(sock)
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


_VERDICT_SECONDS = 5.0  # how much later than it said process 0 may answer
CLOSED_SECONDS = 3.0
"""The time after which a server that hangs up counts as another program's."""
ANSWER_SECONDS = 15.0
"""The time for an answer; process 0 does nothing else while it listens."""


class Guest:
    """The meeting, as each process but process 0 sees it: a guest calls the host.

    Args:
      hello: the facts that this process tells of itself.
      coordinator: the address of process 0, `host:port`.
      end: when to give up, of `time.monotonic()`.
      timeout_seconds: the time until then, for messages.
      secret: of the job.

    Attributes:
      was_greeted: whether a process of some jaxstrategy job has answered.
    """

    def __init__(
        self,
        hello: Message,
        coordinator: str,
        end: float,
        timeout_seconds: float,
        secret: Secret,
    ) -> None:
        self._hello = hello
        self._coordinator = coordinator
        self._end = end
        self._timeout_seconds = timeout_seconds
        self._secret = secret
        self._hung_up_since: float | None = None
        self.was_greeted = False

    def join(self) -> Meeting:
        """Call process 0 until it answers, then wait for its verdict."""
        pause, why = 0.02, "it was not called"
        while time.monotonic() < self._end:
            try:
                sock = self._called()
            except OSError as error:
                why = error.strerror or str(error)
            else:
                try:
                    return self._met_over(sock)
                except _HungUp:
                    why = "it closes the connection"
            time.sleep(min(pause, max(0.0, self._end - time.monotonic())))
            pause = min(2 * pause, 0.3)
        raise ClusterError(
            f"Process {self._hello['index']} (host {self._hello['host']}) could not "
            f"reach process 0 at the coordinator's address {self._coordinator} within "
            f"{self._timeout_seconds:g} s: {why}. Is process 0 running, is this the "
            "address of its host, and does no firewall stand between them?"
        )

    def _called(self) -> socket.socket:
        left = max(0.05, min(2.0, self._end - time.monotonic()))
        sock = socket.create_connection(_channel.endpoint(self._coordinator), left)
        # While nobody listens, a call from this very port reaches itself.
        if sock.getsockname() == sock.getpeername():
            sock.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        _channel.tune(sock)
        return sock

    def _met_over(self, sock: socket.socket) -> Meeting:
        """The meeting, or an error and no connection."""
        with contextlib.ExitStack() as unless_met:
            unless_met.callback(sock.close)
            connection = Connection(sock, self._greet(sock))
            meeting = self._met(connection)
            unless_met.pop_all()
            return meeting

    def _greet(self, sock: socket.socket) -> Channel:
        """Greet, and read the answer; the channel that both make."""
        end = min(self._end, time.monotonic() + ANSWER_SECONDS)
        greeting, channel = Greeting(self._secret, is_host=False), None
        try:
            sock.sendall(greeting.own)
            while channel is None:
                channel = greeting.add(_channel.received(sock, end))
        except TimeoutError as error:
            # The kernel accepts calls for a process that is stopped.
            does = "accepts calls and does not answer (or process 0 is stopped)"
            raise self._foreign(does) from error
        except (EOFError, OSError) as error:
            # Process 0 may be about to listen again; nothing of ours hangs up for long.
            now = time.monotonic()
            self._hung_up_since = self._hung_up_since or now
            if now - self._hung_up_since > CLOSED_SECONDS:
                raise self._foreign("closes the connection") from error
            raise _HungUp from error
        except ValueError as error:
            raise self._foreign("does not speak our protocol") from error
        self.was_greeted, self._hung_up_since = True, None
        return channel

    def _met(self, connection: Connection) -> Meeting:
        message = self._verdict(connection)
        if message["verdict"]:
            raise ClusterError(message["verdict"])
        members = tuple(Member(*row) for row in message["members"])
        connection.sock.settimeout(None)
        return Meeting(self._hello["index"], members, {0: connection})

    def _verdict(self, connection: Connection) -> Message:
        end = self._end
        try:
            connection.send(self._hello)
            while True:
                message = connection.receive(end)
                if not is_word(message, self._hello["count"]):
                    raise ValueError("process 0 says something else")
                if "verdict" in message:
                    return message
                end = max(self._end, time.monotonic() + message["seconds"])
                end += _VERDICT_SECONDS
        except (ForgedError, RefusedError) as error:
            raise self._unproved() from error
        except (EOFError, OSError, ValueError) as error:
            gone = isinstance(error, EOFError | ConnectionError)
            if gone and not connection.channel.is_proved:
                raise _HungUp from error  # to make room, when too many strangers call
            raise ClusterError(
                f"Process 0 at {self._coordinator} "
                + ("ended" if gone else "stopped answering")
                + " before all processes had come. Look at its own output."
            ) from error

    def _unproved(self) -> ClusterError:
        variable = _secret.VARIABLE
        own = "has one" if self._secret else "has none"
        return ClusterError(
            f"The process that listens at the coordinator's address "
            f"{self._coordinator} has another {variable} than process "
            f"{self._hello['index']} (host {self._hello['host']}), which {own}. Give "
            "all processes of the job the same, and each job a port of its own."
        )

    def _foreign(self, does: str) -> ClusterError:
        return ClusterError(
            f"Something that is not process 0 of a jaxstrategy job listens at the "
            f"coordinator's address {self._coordinator}: it {does}. The port is in use "
            "by another program: choose a free one, the same for all processes."
        )


class _HungUp(Exception):
    """The connection was closed before process 0 had proved to be one of the job."""


def meet(
    index: int,
    count: int,
    coordinator: str,
    timeout_seconds: float = 300,
    told: Message | None = None,
    bind_address: str | None = None,
    secret: Secret | None = None,
    listener: socket.socket | None = None,
) -> Meeting:
    """Wait until all processes have come, and agree that they are the right ones.

    Args:
      index: this process's id, from 0 to `count - 1`.
      count: how many processes there are.
      coordinator: where process 0 listens, `"host:port"`.
      timeout_seconds: how long to wait for the others.
      told: what this process says of itself; `facts()` by default.
      bind_address: where process 0 listens if not at the coordinator's host, for
        example `"0.0.0.0"` behind a translated address.
      secret: what all processes of the job know; by default what
        `JAXSTRATEGY_CLUSTER_SECRET` says.
      listener: of process 0, if it listens there already.

    Raises:
      ClusterError: on every process with the same text: ids given twice or out of
        range, different numbers of processes, different versions, processes that did
        not come. On those that it concerns: the port is used by something else, the
        coordinator cannot be reached, or has another secret. There is no secret, and
        other hosts reach the address.
      ValueError: the address, the id, the count or the secret cannot be right.
    """
    host, _ = _channel.endpoint(coordinator)
    if count < 1 or index < 0:
        raise ValueError(
            f"The process's id was {index!r} of {count!r}; ids from 0 to the number "
            "of processes less one were wanted."
        )
    secret = Secret.of_environment() if secret is None else secret
    _secret.check(secret, host if index or bind_address is None else bind_address)
    hello = {"index": index, "count": count, **(facts() if told is None else told)}
    end = time.monotonic() + timeout_seconds
    if index != 0:
        return Guest(hello, coordinator, end, timeout_seconds, secret).join()
    try:
        if listener is None:
            host, port = _channel.endpoint(coordinator)
            listener = listening((bind_address or host, port))
    except OSError as error:
        return _refused_port(error, hello, coordinator, secret)
    with listener:
        return Host(listener, hello, coordinator, end, timeout_seconds, secret).meet()


def listening(endpoint: tuple[str, int]) -> socket.socket:
    """A socket that listens at a host and port, of which 0 is a free one."""
    family, kind, _, _, address = socket.getaddrinfo(
        *endpoint, type=socket.SOCK_STREAM
    )[0]
    listener = socket.socket(family, kind)
    try:
        # So that JAX can use the port at once when we have left it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        # Who called may hang up before `accept`, which would wait for the next one.
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _refused_port(
    error: OSError, hello: Message, coordinator: str, secret: Secret
) -> Meeting:
    """Process 0 cannot listen: a second process 0, or another program, does.

    A second process 0 joins the first one, which tells all of both.
    """
    if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        end = time.monotonic() + CLOSED_SECONDS
        guest = Guest(hello, coordinator, end, 0, secret)
        try:
            return guest.join()
        except ClusterError:
            if guest.was_greeted:
                raise
    host, port = _channel.endpoint(coordinator)
    if error.errno == errno.EADDRINUSE:
        why = (
            f"port {port} is in use by another program. Choose a free port for the "
            "coordinator, the same for all processes, or end that program"
        )
    elif error.errno == errno.EADDRNOTAVAIL:
        why = (
            f"this host, {socket.gethostname()}, has no address {host}. The "
            "coordinator's address must be that of the host of process 0"
        )
    elif isinstance(error, socket.gaierror):
        why = f"the name {host!r} has no address ({error.strerror})"
    else:
        why = f"{error.strerror or error}"
    raise ClusterError(
        f"Process 0 cannot listen at the coordinator's address {coordinator}: {why}."
    ) from error
