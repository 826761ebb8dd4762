"""Messages between processes over ZeroMQ: requests with replies, and news.

A `Server` has an address, a `Client` is one connection to it. Between hosts they speak
TCP with CURVE (Curve25519): both sides have keys that are derived from the job's
secret, so that who does not know it gets no message through, sees nothing, and can
neither change nor replay what others say.

One thread of the process, here called the loop, receives for all servers and clients
and calls their handlers, which must not block. Everything else may be called from any
thread.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hmac
import itertools
import os
import socket
import stat
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeAlias, cast, final

import numpy as np
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from jaxstrategy._src.processes.secret import Secret

Buffer: TypeAlias = bytes | bytearray | memoryview
"""The content of a frame."""

LARGEST = 1 << 30
"""Bytes of the largest frame that is accepted, if nothing else is said."""
CHUNK = 1 << 20
"""Larger arrays travel in frames of so many bytes, which is up to 4 times faster."""

_HEADER = struct.Struct("<BQ")  # kind and number of a message, in a frame of its own
_NEWS, _REQUEST, _REPLY, _ERROR = range(4)
_HANDSHAKE_SECONDS = 5.0  # a caller that has not proved itself is hung up on
_REFUSALS = 3  # so many in a row are no accident of a server that starts or ends
_UNREACHABLE_SECONDS = 20  # after which the kernel gives up a host that is cut off


class LostError(ConnectionError):
    """The connection has ended; what was asked may have been done or not."""


class RefusedError(ConnectionError):
    """The other side has another secret, or is no server of this package."""


class RemoteError(RuntimeError):
    """The server could not answer; the text is the server's."""


def chunks(view: memoryview) -> list[memoryview]:
    """The frames as which bytes are sent, without a copy: change nothing until then."""
    starts = range(0, max(len(view), 1), CHUNK)
    return [view[start : start + CHUNK] for start in starts]


def joined(size: int, frames: Iterator[Buffer]) -> Buffer:
    """The bytes again, of the next frames."""
    if size <= CHUNK:
        return next(frames)
    whole, filled = memoryview(np.empty(size, np.uint8)).cast("B"), 0
    while filled < size:
        part = next(frames)
        whole[filled : filled + len(part)] = part
        filled += len(part)
    return whole


class Request:
    """A message that came to a server; `reply` answers it, now or later."""

    __slots__ = ("_number", "_server", "frames", "is_news", "peer")

    def __init__(
        self, server: Server, peer: bytes, kind: int, number: int, frames: list[Buffer]
    ) -> None:
        self._server = server
        self._number = number
        self.peer = peer  # the connection that it came by, for `Server.send`
        self.frames = frames
        self.is_news = kind == _NEWS  # no reply is wanted

    def reply(self, *frames: Buffer) -> None:
        """Answer; nothing happens if the client has gone."""
        self._answer(_REPLY, *frames)

    def fail(self, text: str) -> None:
        """Let the client's call raise a `RemoteError`."""
        self._answer(_ERROR, text.encode())

    def _answer(self, kind: int, *frames: Buffer) -> None:
        if not self.is_news:
            header = _HEADER.pack(kind, self._number)
            self._server._socket.send([self.peer, header, *frames])


@final
class Server:
    """Receives the messages of all clients that know the secret; raises `OSError`.

    It calls functions in the loop's thread, where `handle` and `lost` may be replaced.
    A `Client` is given its `address`.
    """

    def __init__(
        self,
        secret: Secret,
        handle: Callable[[Request], None],
        *,
        address: str,  # `host:port`, port 0 for a free one
        lost: Callable[[bytes], None] | None = None,  # given the `peer` that has gone
        refused: Callable[[], None] | None = None,  # for each with another secret
        largest: int = LARGEST,  # bytes of a frame
    ) -> None:
        self.handle = handle
        self.lost = lost
        self._refused = refused
        self._peers: dict[int, bytes] = {}  # by file descriptor
        self._known: set[bytes] = set()
        events = _EVENTS if refused is None else _EVENTS | _REFUSED
        self._socket = _Socket(
            zmq.ROUTER, self._received, self._changed, largest, events
        )
        sock = self._socket.socket
        try:
            host, _, port = address.rpartition(":")
            (first, *_) = _addresses(host.strip("[]"), int(port))
            sock.ipv6 = ":" in first[0]
            sock.curve_secretkey = keys(secret, b"server")[1]
            # Of all that call, who has this key is let in.
            domain = keys(secret, b"client")[0]
            sock.curve_server, sock.zap_domain = True, domain
            sock.bind(_tcp(*first))
        except (zmq.ZMQError, OSError) as error:
            self.close(0)
            raise OSError(error.errno, error.strerror) from error
        bound = cast(bytes, sock.last_endpoint).decode().rstrip("\0")
        self.address = f"{host}:{bound.rpartition(':')[2]}"
        self._socket.start()

    def send(self, peer: bytes, *frames: Buffer) -> None:
        """Tell a client news; nothing happens if it has gone."""
        self._socket.send([peer, _HEADER.pack(_NEWS, 0), *frames])

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called in the loop's thread, soon."""
        self._socket.loop.call(function)

    def close(self, linger_seconds: float = 2.0) -> None:
        """End all connections once what was said is sent, or after so long."""
        self._socket.close(linger_seconds)

    def _received(self, frames: list[zmq.Frame]) -> None:
        if len(frames) < 2:
            return  # it is of the job, and yet nonsense
        peer, header = frames[0].bytes, frames[1].bytes
        if peer not in self._known:
            self._known.add(peer)
            self._peers[frames[1].get(zmq.SRCFD)] = peer
        try:
            kind, number = _HEADER.unpack(header)
        except struct.error:
            return
        request = Request(
            self, peer, kind, number, [frame.buffer for frame in frames[2:]]
        )
        try:
            self.handle(request)
        except Exception as error:
            request.fail(f"{type(error).__name__}: {error}")

    def _changed(self, event: int, value: int) -> None:
        if event & _REFUSED and value in _NOT_OF_THE_JOB and self._refused is not None:
            self._refused()
        elif event == zmq.Event.DISCONNECTED:
            peer = self._peers.pop(value, None)
            if peer is not None:
                self._known.discard(peer)
                if self.lost is not None:
                    self.lost(peer)


@final
class Client:
    """One connection to a server; raises `RefusedError` or `TimeoutError`.

    It calls functions in the loop's thread.
    """

    def __init__(
        self,
        address: str,
        secret: Secret,
        *,
        news: Callable[[list[Buffer]], None] | None = None,  # of what the server tells
        lost: Callable[[], None] | None = None,  # once, if not ended by `close`
        timeout_seconds: float = 60.0,  # for reaching the server
        largest: int = LARGEST,  # bytes of a frame
    ) -> None:
        self.address = address
        self._news = news
        self._lost = lost
        self._numbers = itertools.count(1)
        self._futures: dict[int, Future[list[Buffer]]] = {}
        self._connected = threading.Condition()
        self._state = "calls"  # then: "is connected", "is lost", "is closed"
        self._failures = 0
        self._is_accepted = False  # by a kernel, which may do so for a stopped process
        self._socket = _Socket(
            zmq.DEALER, self._received, self._changed, largest, _EVENTS
        )
        try:
            self._connect(address, secret, time.monotonic() + timeout_seconds)
        except BaseException:
            self.close(0)
            raise

    @property
    def is_connected(self) -> bool:
        """Whether the connection stands, as far as is known."""
        return self._state == "is connected"

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called in the loop's thread, soon."""
        self._socket.loop.call(function)

    def request(
        self, *frames: Buffer, timeout_seconds: float | None = None
    ) -> list[Buffer]:
        """The server's reply."""
        future = self.submit(*frames)
        try:
            return future.result(timeout_seconds)
        except TimeoutError:
            future.cancel()
            raise

    def submit(self, *frames: Buffer) -> Future[list[Buffer]]:
        """Send a request; the future of its reply."""
        future: Future[list[Buffer]] = Future()
        number = next(self._numbers)
        self._futures[number] = future
        if self.is_connected:
            self._socket.send([_HEADER.pack(_REQUEST, number), *frames])
        # Looked at again: who ends the connection fails the futures it sees.
        if not self.is_connected:
            self._fail_all()
        return future

    def send(self, *frames: Buffer) -> None:
        """Tell the server something, without a reply."""
        if not self.is_connected:
            raise LostError(f"The connection to {self.address} {self._state}.")
        self._socket.send([_HEADER.pack(_NEWS, 0), *frames])

    def close(self, linger_seconds: float = 2.0) -> None:
        """End the connection once what was said is sent, or after so long."""
        if self._state != "is lost":
            self._state = "is closed"
        self._socket.close(linger_seconds)
        self._fail_all()

    def _connect(self, address: str, secret: Secret, end: float) -> None:
        sock = self._socket.socket
        sock.immediate = True
        sock.reconnect_ivl, sock.reconnect_ivl_max = 20, 300
        sock.curve_serverkey = keys(secret, b"server")[0]
        sock.curve_publickey, sock.curve_secretkey = keys(secret, b"client")
        self._socket.start()
        why = "it does not answer"
        while time.monotonic() < end:
            host, _, port = address.rpartition(":")
            try:
                found = _addresses(host.strip("[]"), int(port))
                endpoints = [_tcp(*each) for each in found]
            except socket.gaierror as error:  # it may get an address later
                endpoints, why = [], error.strerror or str(error)
                time.sleep(min(0.3, max(0.0, end - time.monotonic())))
            # Names may have several addresses, such as those of IPv4 and IPv6.
            seconds = 1.0 if len(endpoints) > 1 else float("inf")
            for endpoint in endpoints:
                with self._socket.lock:
                    sock.ipv6 = endpoint.startswith("tcp://[")
                    sock.connect(endpoint)
                if self._is_answered(min(end, time.monotonic() + seconds), end):
                    return
                with self._socket.lock, contextlib.suppress(zmq.ZMQError):
                    sock.disconnect(endpoint)
        raise TimeoutError(f"Nobody could be reached at {address}: {why}.")

    def _is_answered(self, first: float, end: float) -> bool:
        """Whether the server lets us in; none may listen longer than the first time."""
        with self._connected:
            while self._state == "calls":
                left = (end if self._is_accepted else first) - time.monotonic()
                if left <= 0:
                    return False
                self._connected.wait(left)
            if self._state == "is connected":
                return True
        raise RefusedError(
            f"What listens at {self.address} has another secret, or is no server of "
            "jaxstrategy."
        )

    def _received(self, frames: list[zmq.Frame]) -> None:
        kind, number = _HEADER.unpack(frames[0].bytes)
        rest: list[Buffer] = [frame.buffer for frame in frames[1:]]
        if kind == _NEWS:
            if self._news is not None:
                self._news(rest)
            return
        future = self._futures.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if kind == _REPLY:
            future.set_result(rest)
        else:
            future.set_exception(RemoteError(bytes(rest[0]).decode()))

    def _changed(self, event: int, value: int) -> None:
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._become("is connected")
        elif self._state == "is connected":
            if event == zmq.Event.DISCONNECTED:
                self._become("is lost")
                self._socket.close(0)  # which would connect again
                self._fail_all()
                if self._lost is not None:
                    self._lost()
        elif event == zmq.Event.CONNECTED:
            self._is_accepted = True
        elif event == zmq.Event.DISCONNECTED:
            self._failures += 1
            if self._failures >= _REFUSALS:
                self._become("was refused")

    def _become(self, state: str) -> None:
        with self._connected:
            self._state = state
            self._connected.notify_all()

    def _fail_all(self) -> None:
        while self._futures:
            with contextlib.suppress(KeyError):
                _, future = self._futures.popitem()
                if future.set_running_or_notify_cancel():
                    text = f"The connection to {self.address} {self._state}."
                    future.set_exception(LostError(text))


def keys(secret: Secret, role: bytes) -> tuple[bytes, bytes]:
    """The public and the private Curve25519 key of a role, from the job's secret.

    HKDF (RFC 5869): the secret's own key is the extracted one, expanded here.
    """
    extracted = secret.key(b"jaxstrategy messages 1")
    seed = hmac.digest(extracted, role + b"\x01", "sha256")
    private = z85.encode(seed)
    return zmq.curve_public(private), private


def _addresses(host: str, port: int) -> list[tuple[str, int]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((str(each[4][0]), port) for each in found))


def _tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class _Socket:
    """A socket of ZeroMQ, with the events of its connections.

    It is used under a lock by who sends and by the loop, which polls its descriptor.
    """

    def __init__(
        self,
        kind: int,
        received: Callable[[list[zmq.Frame]], None],
        changed: Callable[[int, int], None],
        largest: int,
        events: int,
    ) -> None:
        self.loop = _loop()
        self.received = received
        self.changed = changed
        self.lock = threading.RLock()
        self.is_closed = False
        self.descriptors: set[int] = set()
        self.socket = sock = self.loop.context.socket(kind)
        # Nothing is dropped because somebody is slow: who sends limits what is open.
        sock.sndhwm = sock.rcvhwm = 0
        sock.linger = 0
        sock.maxmsgsize = largest
        sock.handshake_ivl = int(1000 * _HANDSHAKE_SECONDS)
        # A host that is cut off; one whose process is stopped or busy still answers.
        sock.tcp_keepalive, sock.tcp_keepalive_idle = 1, 5
        sock.tcp_keepalive_intvl, sock.tcp_keepalive_cnt = 3, 5
        sock.setsockopt(zmq.TCP_MAXRT, 1000 * _UNREACHABLE_SECONDS)
        self.monitor = sock.get_monitor_socket(events)

    def start(self) -> None:
        """Begin to receive."""
        self.loop.call(lambda: self.loop.add(self))

    def send(self, frames: list[Buffer]) -> None:
        with self.lock:
            if self.is_closed:
                return
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                # To send looks for new connections at most each millisecond; to ask
                # for events always does.
                if cast(int, self.socket.events) & zmq.POLLOUT:
                    self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                # Else it has ended, and the loop reports that in a moment.
            # Sending takes in what came meanwhile, and nothing else would report it.
            is_readable = cast(int, self.socket.events) & zmq.POLLIN
        if is_readable:
            self.loop.call(self.readable)

    def readable(self) -> None:
        """Receive all there is, in the loop's thread."""
        while True:
            # First: a descriptor that was closed may be another connection's by now.
            self.look()
            with self.lock:
                if self.is_closed or not cast(int, self.socket.events) & zmq.POLLIN:
                    return
                frames = self.socket.recv_multipart(copy=False)
            # What fails is one message; ZeroMQ does not tell again of those behind it.
            self.loop.tried(functools.partial(self.received, frames))

    def look(self) -> None:
        """Take in what has become of connections, in the loop's thread."""
        while not self.is_closed and cast(int, self.monitor.events) & zmq.POLLIN:
            told = parse_monitor_message(self.monitor.recv_multipart())
            event, value = told["event"], told["value"]
            if event in _OPENED:
                self.descriptors.add(value)
            elif event in (zmq.Event.DISCONNECTED, zmq.Event.CLOSED):
                self.descriptors.discard(value)
            self.changed(event, value)

    def close(self, linger_seconds: float) -> None:
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
        done = threading.Event()

        def close() -> None:
            self.loop.remove(self)
            with self.lock:
                self.socket.disable_monitor()
                self.monitor.close(0)
                self.socket.close(int(1000 * linger_seconds))
            done.set()

        self.loop.call(close)
        if threading.current_thread() is not self.loop.thread:
            done.wait(linger_seconds + 1)


_OPENED = (zmq.Event.ACCEPTED, zmq.Event.CONNECTED, zmq.Event.LISTENING)
# Not of failed handshakes: to tell of one, libzmq 4.3 forgets that a message was
# forged, and leaves the connection open.
_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED
for _event in _OPENED:
    _EVENTS |= _event
_REFUSED = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
# What the event says: a box that cannot be opened, and the authenticator's answer.
_NOT_OF_THE_JOB = (int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC), 400)


class _Loop:
    """The thread that receives for all servers and clients of this process."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 8192)
        self.sockets: list[_Socket] = []
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._authenticator = self.context.socket(zmq.REP)
        self._authenticator.bind("inproc://zeromq.zap.01")
        self._handlers: dict[object, Callable[[], None]] = {
            self._woken: self._called,
            self._authenticator: self._authenticate,
        }
        self._poller.register(self._authenticator, zmq.POLLIN)
        self.thread = threading.Thread(
            target=self._run, name="jaxstrategy-messages", daemon=True
        )
        self.thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called in the loop's thread."""
        self._calls.append(function)
        with contextlib.suppress(BlockingIOError):  # it is about to wake up already
            os.write(self._wake, b".")

    def add(self, each: _Socket) -> None:
        if each.is_closed:
            return
        self.sockets.append(each)
        for polled, handler in (
            (each.monitor, each.look),
            (each.socket.fd, each.readable),
        ):
            self._handlers[polled] = handler
            self._poller.register(polled, zmq.POLLIN)
        each.look()
        each.readable()

    def remove(self, each: _Socket) -> None:
        if each in self.sockets:
            self.sockets.remove(each)
            for polled in (each.monitor, each.socket.fd):
                self._poller.unregister(polled)
                del self._handlers[polled]

    def close_in_forked_child(self) -> None:
        """Give up a child's copies, which would keep a dead parent's lines open."""
        for each in self.sockets:
            for descriptor in each.descriptors:
                with contextlib.suppress(OSError):
                    # Else it was closed a moment ago, and is another file's by now.
                    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                        os.close(descriptor)

    def _run(self) -> None:
        while True:
            for polled, _ in self._poller.poll():
                # One that was handled before may have removed it.
                if (handler := self._handlers.get(polled)) is not None:
                    self.tried(handler)

    def _called(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while self._calls:
            self.tried(self._calls.popleft())

    def tried(self, function: Callable[[], object]) -> None:
        """Call a function, in the loop's thread, and print what it raises."""
        try:
            function()
        except Exception:  # of one server or client, by which the others do not end
            traceback.print_exc()

    def _authenticate(self) -> None:
        """Let in who has the key that is the name of the server's domain (ZAP 1.0)."""
        version, request, domain, *_, key = self._authenticator.recv_multipart()
        is_known = hmac.compare_digest(z85.encode(key), domain)
        status = (b"200", b"OK") if is_known else (b"400", b"unknown")
        self._authenticator.send_multipart([version, request, *status, b"", b""])


_the_loop: _Loop | None = None
_starting = threading.Lock()


def _loop() -> _Loop:
    global _the_loop
    with _starting:
        if _the_loop is None:
            _the_loop = _Loop()
        return _the_loop


def _forked() -> None:
    global _the_loop, _starting
    _starting = threading.Lock()
    if _the_loop is not None:
        _the_loop.close_in_forked_child()
        _abandoned.append(_the_loop)  # whose sockets nobody may touch here
    _the_loop = None


_abandoned: list[_Loop] = []
os.register_at_fork(after_in_child=_forked)
