"""The rendezvous of a job's processes, before JAX is told of any of them.

JAX answers most mistakes here with a crash or a long silence: a coordinator port that
is taken is a segmentation fault, a process that never comes an abort of all others
after `initialization_timeout`, both without a Python error (measured with 0.10 and
0.12). So they meet first. Process 0 listens at the coordinator's address, which it
leaves to JAX afterwards, and tells who calls there of another port of its own. There
all of them say who they are, it tells all of them the same verdict, and the store goes
on with the same connections.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import json
import os
import platform
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxstrategy._src.cluster.resolvers.cluster_spec import address_of, endpoint
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.messages import (
    Buffer,
    Client,
    LostError,
    RefusedError,
    RemoteError,
    Request,
    Server,
)
from jaxstrategy._src.processes.secret import Secret
from jaxstrategy._src.text import listed, plural
from jaxstrategy._src.version import version_of

Json: TypeAlias = Any
"""A value of JSON."""
Message: TypeAlias = dict[str, Json]
"""What processes tell each other, an object of JSON."""

SAME = ("jaxstrategy", "jax", "jaxlib")
"""Packages whose versions must be equal in all processes."""
LARGEST = 1 << 28
"""Bytes of a message to process 0."""

# After the first mistake the rendezvous waits so long for others, to tell them of it.
_GRACE_SECONDS = 2.0
_VERDICT_SECONDS = 5.0  # how much later than it said process 0 may answer
CLOSED_SECONDS = 3.0
"""The time after which a server that hangs up counts as another program's."""
ANSWER_SECONDS = 15.0
"""The time for an answer; process 0 does nothing else while it listens."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of the job; prints as `process 1 (host a, pid 17)`."""

    index: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes of a job that have met, as one of them sees it."""

    index: int
    members: tuple[Member, ...]  # all processes, by their ids
    host: Host | None  # of process 0
    client: Client | None  # of the others, to process 0
    # What that process says of itself, as frames; None when it has gone.
    news: queue.SimpleQueue[list[Buffer] | None]

    def close(self) -> None:
        """Hang up."""
        if self.client is not None:
            self.client.close()
        if self.host is not None:
            self.host.close()


def facts() -> Message:
    """The facts that a process tells of itself: host, pid, versions."""
    versions = {name: version_of(name) for name in SAME}
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("JAXSTRATEGY_JOB", ""),
        "versions": {**versions, "Python": platform.python_version()},
    }


def member(hello: Message) -> Member:
    """The process that says this."""
    return Member(hello["index"], hello.get("host", "?"), hello.get("pid", 0))


def written(message: Message) -> bytes:
    """A message as the frame that carries it."""
    try:
        body = json.dumps(message, separators=(",", ":")).encode()
    except RecursionError:
        raise ValueError(
            "A message is nested too many levels deep. Give a flat list."
        ) from None
    if len(body) > LARGEST:
        raise ValueError(
            f"A message has {len(body)} bytes; processes tell each other up to "
            f"{LARGEST} at once. Values of steps belong into arrays."
        )
    return body


def read(frames: Sequence[Buffer]) -> Message:
    """The message that was written."""
    message = json.loads(bytes(frames[0]))
    if not isinstance(message, dict):
        raise ValueError("it is no message")
    return message


def meet(
    index: int,
    count: int,
    coordinator: str,
    timeout_seconds: float = 300,
    told: Message | None = None,
    secret: Secret | None = None,
    host: Host | None = None,
) -> Group:
    """Wait until all processes have come, and agree that they are the right ones."""
    name, _ = endpoint(coordinator)
    if count < 1 or index < 0:
        raise ValueError(
            f"The process's id was {index!r} of {count!r}; ids from 0 to the number "
            "of processes less one were wanted."
        )
    secret = Secret.of_environment() if secret is None else secret
    _secret.check(secret, name)
    hello = {"index": index, "count": count, **(facts() if told is None else told)}
    if index == 0:
        try:
            host = host or Host(coordinator, secret, timeout_seconds)
        except OSError as error:
            return _second_host(error, hello, coordinator, secret)
        return host.meet(hello, coordinator, timeout_seconds)
    return _Guest(hello, coordinator, timeout_seconds, secret).meet()


class Host:
    """The rendezvous as process 0 leads it; raises `OSError` if it cannot listen."""

    def __init__(
        self, coordinator: str, secret: Secret, timeout_seconds: float = 0.0
    ) -> None:
        name, _, port = coordinator.rpartition(":")
        self._changed = threading.Condition()
        self._calls: dict[bytes, tuple[Request, Message]] = {}  # by connection
        self._gone: list[Message] = []
        self._refused = 0
        # Others may ask for it before `meet` is called.
        self._end = time.monotonic() + timeout_seconds
        self._early: list[Request] = []
        self._ended: list[bytes] = []
        self.peers: dict[int, bytes] = {}  # the connection to each, by their ids
        self.server = Server(
            secret,
            self._received,
            address=f"{name}:0",
            lost=self._left,
            largest=LARGEST,
        )
        try:
            self._pointer = Server(
                secret, self._asked, address=coordinator, refused=self._note_refused
            )
        except OSError:
            self.server.close(0)
            raise
        self.address = self._pointer.address
        self._is_at = name, int(port)

    def meet(self, hello: Message, coordinator: str, timeout_seconds: float) -> Group:
        """Wait for all, and tell them the verdict; raises as `meet`."""
        count = hello["count"]
        with self._changed:
            self._end = time.monotonic() + timeout_seconds
            while True:
                others = self._of_this_job(hello, coordinator)
                wrong, left = _mistakes(hello, others), self._end - time.monotonic()
                if wrong:
                    left = min(left, _GRACE_SECONDS)
                    self._end = time.monotonic() + left
                if left <= 0 or (not wrong and len(others) + 1 >= count):
                    break
                self._changed.wait(min(left, 0.5))
            wrong = wrong or self._missing(hello, others, timeout_seconds)
            calls = list(self._calls.items())
            members = sorted(map(member, (hello, *others)), key=lambda one: one.index)
            if not wrong:
                self.peers = {said["index"]: peer for peer, (_, said) in calls}
        text = ""
        if wrong:
            text = (
                f"The {count} processes of the job at {coordinator} could not start "
                f"together: {'; '.join(wrong)}."
            )
        rows = [dataclasses.astuple(each) for each in members]
        for _, (request, _) in calls:
            request.reply(written({"verdict": text, "members": rows}))
        if wrong:
            with self._changed:  # they hang up when they have heard it
                self._changed.wait_for(lambda: not self._calls, _GRACE_SECONDS)
            self.close()
            raise ClusterError(text)
        self._leave_port()
        return Group(0, tuple(members), self, None, queue.SimpleQueue())

    def begin(
        self, handle: Callable[[Request], None], lost: Callable[[bytes], None]
    ) -> None:
        """Hand on what all others say, and that they have gone, since all have met."""

        def begin() -> None:
            self.server.handle, self.server.lost = handle, lost
            for request in self._early:
                handle(request)
            for peer in self._ended:
                lost(peer)

        self.server.call(begin)

    def close(self) -> None:
        """Hang up."""
        self._pointer.close()
        self.server.close()

    def _asked(self, request: Request) -> None:
        """Name the port, and the seconds for which process 0 still waits."""
        port = endpoint(self.server.address)[1]
        left = max(0.0, self._end - time.monotonic())
        request.reply(written({"port": port, "seconds": left}))

    def _received(self, request: Request) -> None:
        with self._changed:
            if self.peers:
                self._early.append(request)
                return
            hello = read(request.frames)
            if not _is_hello(hello):
                raise ValueError("this is no hello")
            if request.peer in self._calls:
                raise ValueError("it says hello twice")
            self._calls[request.peer] = request, hello
            self._changed.notify_all()

    def _of_this_job(self, own: Message, coordinator: str) -> list[Message]:
        """Who has come; processes of other jobs are sent away."""
        for peer, (request, hello) in list(self._calls.items()):
            if hello.get("job", "") != own.get("job", ""):
                del self._calls[peer]
                other = (
                    f"{member(hello)} belongs to job {hello.get('job')!r}, but "
                    f"{member(own)} at {coordinator} to job {own.get('job')!r}. Give "
                    "each job a port of its own."
                )
                request.reply(written({"verdict": other}))
        return [hello for _, hello in self._calls.values()]

    def _left(self, peer: bytes) -> None:
        with self._changed:
            if self.peers:
                self._ended.append(peer)
            elif (call := self._calls.pop(peer, None)) is not None:
                self._gone.append(call[1])
            self._changed.notify_all()

    def _note_refused(self) -> None:
        self._refused += 1
        if self._refused == 1:  # and no more words: strangers may call often
            print(
                f"jaxstrategy: process 0 refused a caller: it has another "
                f"{_secret.VARIABLE}, or none. The job waits on.",
                file=sys.stderr,
                flush=True,
            )

    def _missing(
        self, own: Message, others: Sequence[Message], timeout_seconds: float
    ) -> list[str]:
        count = own["count"]
        missing = sorted(set(range(count)) - {h["index"] for h in (own, *others)})
        if not missing:
            return []
        wrong = [
            f"{count - len(missing)} of {count} processes came within "
            f"{timeout_seconds:g} s; {plural(len(missing), 'process')} "
            f"{listed(missing, 16)} did not"
        ]
        wrong += [
            f"{member(hello)} came, and ended before all were there"
            for hello in self._gone
            if hello["index"] in missing
        ]
        if self._refused:
            times = "once" if self._refused == 1 else f"{self._refused} times"
            other = f"callers with another {_secret.VARIABLE}, or none"
            wrong.append(f"{other}, were refused {times}")
        return wrong

    def _leave_port(self) -> None:
        """Listen no more at the coordinator's address, where JAX begins to."""
        self._pointer.close()
        end = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                family = socket.AF_INET6 if ":" in self._is_at[0] else socket.AF_INET
                host = self._is_at[0].strip("[]")
                socket.create_server((host, self._is_at[1]), family=family).close()
                return
            time.sleep(0.005)


class _Guest:
    """The rendezvous as each process but process 0 sees it: a guest calls the host."""

    def __init__(
        self, hello: Message, coordinator: str, timeout_seconds: float, secret: Secret
    ) -> None:
        self._hello = hello
        self._coordinator = coordinator
        self._timeout_seconds = timeout_seconds
        self._secret = secret
        self._end = time.monotonic() + timeout_seconds

    def meet(self) -> Group:
        """Call process 0 until it answers, then wait for its verdict."""
        port, seconds = self._port()
        name, _ = endpoint(self._coordinator)
        news: queue.SimpleQueue[list[Buffer] | None] = queue.SimpleQueue()
        try:
            client = Client(
                address_of(name, port),
                self._secret,
                news=news.put,
                lost=lambda: news.put(None),
                timeout_seconds=max(_VERDICT_SECONDS, self._end - time.monotonic()),
                largest=-1,  # an answer has what all processes gave
            )
        except OSError as error:
            raise ClusterError(
                f"Process {self._hello['index']} (host {self._hello['host']}) has "
                f"reached process 0 at the coordinator's address {self._coordinator}, "
                f"but not at port {port} of the same host, which it named: {error} "
                "Does a firewall stand between them?"
            ) from error
        try:
            members = self._verdict(client, seconds)
        except BaseException:
            client.close(0)
            raise
        return Group(self._hello["index"], members, None, client, news)

    def _port(self) -> tuple[int, float]:
        """The port that process 0 names, and the seconds for which it still waits."""
        hung_up_since, why = None, "it was not called"
        while (left := self._end - time.monotonic()) > 0:
            try:
                client = Client(
                    self._coordinator,
                    self._secret,
                    timeout_seconds=min(left, ANSWER_SECONDS),
                )
                with contextlib.closing(client):
                    said = read(client.request(timeout_seconds=ANSWER_SECONDS))
                return said["port"], said["seconds"]
            except (RefusedError, TimeoutError):
                does = self._other_program()
            except (LostError, RemoteError):
                does = "closes the connection"
            if does in ("closes the connection", ""):
                # Process 0 may be about to listen again.
                now = time.monotonic()
                hung_up_since = hung_up_since or now
                if does and now - hung_up_since > CLOSED_SECONDS:
                    raise self._foreign(does)
            elif not does.startswith("it is not there: "):
                raise self._foreign(does)
            else:
                why = does.removeprefix("it is not there: ")
            time.sleep(min(0.05, max(0.0, self._end - time.monotonic())))
        raise ClusterError(
            f"Process {self._hello['index']} (host {self._hello['host']}) could not "
            f"reach process 0 at the coordinator's address {self._coordinator} within "
            f"{self._timeout_seconds:g} s: {why}. Is process 0 running, is this the "
            "address of its host, and does no firewall stand between them?"
        )

    def _other_program(self) -> str:
        """Why nobody of the job answers, found out by plain bytes."""
        try:
            sock = socket.create_connection(endpoint(self._coordinator), 2.0)
        except OSError as error:
            return f"it is not there: {error.strerror or error}"
        with sock:
            # While nobody listens, a call from this very port reaches itself.
            if sock.getsockname() == sock.getpeername():
                return f"it is not there: {os.strerror(errno.ECONNREFUSED)}"
            sock.settimeout(min(2.0, ANSWER_SECONDS))
            said = b""
            try:
                sock.sendall(_ZMTP)
                while len(said) < len(_ZMTP) and said[:1] in (b"", _ZMTP[:1]):
                    if not (data := sock.recv(100)):
                        return "closes the connection"
                    said += data
            except TimeoutError:
                return "accepts calls and does not answer (or process 0 is stopped)"
            except OSError:
                return "closes the connection"
        if said[:1] != _ZMTP[:1] or said[10:20] != _ZMTP[10:20]:
            return "does not speak our protocol"
        own = "has one" if self._secret else "has none"
        raise ClusterError(
            f"The process that listens at the coordinator's address "
            f"{self._coordinator} has another {_secret.VARIABLE} than process "
            f"{self._hello['index']} (host {self._hello['host']}), which {own}. Give "
            "all processes of the job the same, and each job a port of its own."
        )

    def _verdict(self, client: Client, seconds: float) -> tuple[Member, ...]:
        left = max(self._end - time.monotonic(), seconds) + _VERDICT_SECONDS
        try:
            said = read(client.request(written(self._hello), timeout_seconds=left))
        except (OSError, RuntimeError, ValueError) as error:
            gone = isinstance(error, LostError)
            raise ClusterError(
                f"Process 0 at {self._coordinator} "
                + ("ended" if gone else "stopped answering")
                + " before all processes had come. Look at its own output."
            ) from error
        if said["verdict"]:
            raise ClusterError(said["verdict"])
        return tuple(Member(*row) for row in said["members"])

    def _foreign(self, does: str) -> ClusterError:
        return ClusterError(
            f"Something that is not process 0 of a jaxstrategy job listens at the "
            f"coordinator's address {self._coordinator}: it {does}. The port is in use "
            "by another program: choose a free one, the same for all processes."
        )


# How a connection of ZeroMQ with CURVE begins (ZMTP 3.1).
_ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)


def _is_hello(hello: Message) -> bool:
    """Whether a process says so who it is."""
    kinds = {"index": int, "count": int, "host": str, "pid": int, "job": str}
    return {"index", "count"} <= hello.keys() and all(
        type(hello.get(name, kind())) is kind for name, kind in kinds.items()
    )


def _mistakes(own: Message, others: Sequence[Message]) -> list[str]:
    """The contradictions that no further process could resolve."""
    count, first, wrong = own["count"], member(own), []
    holders = collections.defaultdict(list)
    for hello in (own, *others):
        one = member(hello)
        holders[one.index].append(f"pid {one.pid} on host {one.host}")
        if hello["count"] != count:
            wrong.append(
                f"{one} was told that there are {hello['count']} processes, {first} "
                f"that there are {count}"
            )
        elif not 0 <= one.index < count:
            wrong.append(
                f"{one} is out of range: the ids of {count} processes are 0 to "
                f"{count - 1}"
            )
        wrong += _other_versions(own, hello)
    for index, held in sorted(holders.items()):
        if len(held) > 1:
            wrong.append(f"process id {index} was given to {' and to '.join(held)}")
    return wrong


def _other_versions(own: Message, hello: Message) -> list[str]:
    ours, theirs = own.get("versions", {}), hello.get("versions", {})
    differ = [name for name in SAME if ours.get(name) != theirs.get(name)]
    if not differ:
        return []

    def listing(versions: Mapping[str, str]) -> str:
        return ", ".join(f"{name} {versions.get(name)}" for name in differ)

    return [f"{member(hello)} has {listing(theirs)}, {member(own)} {listing(ours)}"]


def _second_host(
    error: OSError, hello: Message, coordinator: str, secret: Secret
) -> Group:
    """Process 0 cannot listen: a second process 0, or another program, does.

    A second process 0 joins the first one, which tells all of both.
    """
    name, port = endpoint(coordinator)
    if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        guest = _Guest(hello, coordinator, CLOSED_SECONDS, secret)
        try:
            guest._port()
        except ClusterError as told:
            if _secret.VARIABLE in str(told):
                raise
        else:
            return _Guest(hello, coordinator, CLOSED_SECONDS, secret).meet()
    if error.errno == errno.EADDRINUSE:
        why = (
            f"port {port} is in use by another program. Choose a free port for the "
            "coordinator, the same for all processes, or end that program"
        )
    elif error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        why = (
            f"this host, {socket.gethostname()}, has no address {name}. The "
            "coordinator's address must be that of the host of process 0"
        )
    elif isinstance(error, socket.gaierror):
        why = f"the name {name!r} has no address ({error.strerror})"
    else:
        why = f"{error.strerror or error}"
    raise ClusterError(
        f"Process 0 cannot listen at the coordinator's address {coordinator}: {why}."
    ) from error
