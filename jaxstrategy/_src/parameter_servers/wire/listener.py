"""Where processes of the job connect and prove that they are of it."""

from __future__ import annotations

import errno
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import final

from jaxstrategy._src.cluster.resolvers.cluster_spec import address_of, endpoint
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.launch.child_process import started
from jaxstrategy._src.parameter_servers.wire.stream import Keys, Stream
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.secret import Secret

SECONDS = 10.0
"""The time for a handshake."""

_GREETING = f"jaxstrategy-frames/3 {sys.byteorder}\n".encode()
"""The first bytes on each connection, both ways, before a nonce."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_REFUSAL = bytes(_PROOF_BYTES)  # the host's answer to a wrong proof; anybody may say so
_UNREACHABLE = 20  # seconds after which the kernel gives up a host that is cut off


class _AnotherSecretError(ValueError):
    """The other side does not know the secret of this one."""


def welcomed(sock: socket.socket, secret: Secret) -> Stream:
    """The stream of a connection that somebody made to this process."""
    end = time.monotonic() + SECONDS
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        context = _context(_nonce(sock, end), nonce)
        sock.sendall(_GREETING + nonce)
        # The guest first, so that strangers get nothing that they could try words on.
        if not _is_proof(sock, end, secret.key(context + b"proof of the guest")):
            sock.sendall(_REFUSAL)
            raise _AnotherSecretError("it has another secret")
        sock.sendall(secret.key(context + b"proof of the host"))
    except (EOFError, OSError, ValueError) as error:
        sock.close()
        raise ClusterError(f"Somebody who called is none of the job: {error}") from None
    except BaseException:
        sock.close()
        raise
    return _stream(sock, secret, context, is_host=True)


def greeted(sock: socket.socket, secret: Secret, where: str) -> Stream:
    """The stream of a connection that this process has made."""
    end = time.monotonic() + SECONDS
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        sock.settimeout(SECONDS)
        sock.sendall(_GREETING + nonce)
        context = _context(nonce, _nonce(sock, end))
        sock.sendall(secret.key(context + b"proof of the guest"))
        if not _is_proof(sock, end, secret.key(context + b"proof of the host")):
            raise _AnotherSecretError
    except BaseException as error:
        sock.close()
        if isinstance(error, EOFError | OSError):
            raise ConnectionError(f"{where} does not answer ({error})") from error
        if isinstance(error, ValueError):
            raise _stranger(where, secret, error) from error
        raise
    return _stream(sock, secret, context, is_host=False)


def _context(guests_nonce: bytes, hosts_nonce: bytes) -> bytes:
    """What makes the keys of a connection others than those of any other one."""
    return _GREETING + guests_nonce + hosts_nonce


def _nonce(sock: socket.socket, end: float) -> bytes:
    """The nonce of the other side, which must greet as this one does."""
    replies = b""
    while (left := len(_GREETING) + _NONCE_BYTES - len(replies)) > 0:
        replies += _received(sock, left, end)
        if not _GREETING.startswith(replies[: len(_GREETING)]):
            raise ValueError(f"it says {replies[:40]!r}, not {_GREETING!r}")
    return replies[len(_GREETING) :]


def _is_proof(sock: socket.socket, end: float, expected: bytes) -> bool:
    """Whether the other side sends what only who knows the secret can make."""
    replies = b""
    while (left := _PROOF_BYTES - len(replies)) > 0:
        replies += _received(sock, left, end)
    # In constant time: that of `==` tells how many bytes of a guess are right.
    return secrets.compare_digest(replies, expected)


def _received(sock: socket.socket, most: int, end: float) -> bytes:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake took too long")
    sock.settimeout(left)
    if not (data := sock.recv(most)):
        raise EOFError("it hung up")
    return data


def _stream(
    sock: socket.socket, secret: Secret, context: bytes, is_host: bool
) -> Stream:
    to_host = secret.key(context + b"guest to host")
    to_guest = secret.key(context + b"host to guest")
    keys = Keys(to_guest, to_host) if is_host else Keys(to_host, to_guest)
    return Stream(sock, keys, bool(secret) or _secret.is_network_trusted())


def _stranger(where: str, secret: Secret, error: ValueError) -> ClusterError:
    if not isinstance(error, _AnotherSecretError):
        return ClusterError(
            f"What listens at {where} is no process of a job of this version: {error}."
        )
    own = "has one" if secret else "has none"
    return ClusterError(
        f"The process that listens at {where} has another {_secret.VARIABLE} than this "
        f"one, which {own}. Give all processes of the job the same."
    )


_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ECONNABORTED)
_PAUSE = 0.05  # while this process has too many files open
_ALL_ADDRESSES = ("", "*", "0.0.0.0", "::")
_MOST_STRANGERS = 64  # connections at once whose other end has not proved itself


@final
class Listener:
    """An address at which processes of the job connect, and nobody else."""

    def __init__(self, address: str, secret: Secret) -> None:
        self._secret = secret
        self._sock = _bound(address, secret)
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, socket.socket | None] = {}
        self._is_closed = False

    @property
    def address(self) -> str:
        """Where others connect."""
        return address_of(*self._sock.getsockname()[:2])

    def start(self, take: Callable[[Stream], None]) -> None:
        """Call a function with the stream of each that connects, in threads."""
        self._in_thread(self._sock, lambda: self._accept(take))

    def close(self) -> None:
        """Listen no more; streams that were made stay. Once is enough."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            left = dict(self._threads)
        for sock in (self._sock, *left.values()):
            if sock is not None:
                _shut(sock)
        for thread in left:
            if thread is not threading.current_thread():
                thread.join()
        self._sock.close()

    def _accept(self, take: Callable[[Stream], None]) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if self._is_closed or error.errno not in _PASSING:
                    return
                time.sleep(_PAUSE)
                continue
            self._make_room()
            self._in_thread(sock, lambda sock=sock: self._welcome(sock, take))

    def _make_room(self) -> None:
        """Hang up on the stranger who came first, if there are many."""
        with self._lock:
            strangers = [sock for sock in self._threads.values() if sock is not None]
        if len(strangers) > _MOST_STRANGERS:
            _shut(strangers[1])  # the first one is the listener's own

    def _welcome(self, sock: socket.socket, take: Callable[[Stream], None]) -> None:
        try:
            _tune(sock)
            stream = welcomed(sock, self._secret)
        except (ClusterError, OSError):
            sock.close()
            return
        with self._lock:
            # `close` must not end what is no stranger's any more.
            self._threads[threading.current_thread()] = None
        take(stream)

    def _in_thread(self, sock: socket.socket, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.pop(threading.current_thread(), None)

        thread = threading.Thread(target=run, name="jaxstrategy listener", daemon=True)
        with self._lock:
            if self._is_closed or not started(thread):
                sock.close()
            else:
                self._threads[thread] = sock


def dialled(address: str, secret: Secret) -> Stream:
    """The stream of a new connection to a `Listener`."""
    try:
        sock = _connected(address, secret)
    except OSError as error:
        why = error.strerror or error
        raise ConnectionError(f"{address} does not answer ({why})") from error
    return greeted(sock, secret, address)


def _connected(address: str, secret: Secret) -> socket.socket:
    host, port = endpoint(address)
    _secret.check(secret, host)
    sock = socket.create_connection((host, port), SECONDS)
    # While nobody listens, a call from this very port reaches itself.
    if sock.getsockname() == sock.getpeername():
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    _tune(sock)
    return sock


def _bound(address: str, secret: Secret) -> socket.socket:
    name, _, port_text = address.rpartition(":")
    host, port = endpoint(f"{name}:1" if (is_any := port_text == "0") else address)
    port = 0 if is_any else port
    if host in _ALL_ADDRESSES:
        raise ClusterError(
            f"{address!r} is every address of this host. Give the one at which the "
            "other processes of the job reach it."
        )
    _secret.check(secret, host)
    family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where, family=family)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)  # wakes who waits for it
    except OSError:
        pass  # the other end was faster


def _tune(sock: socket.socket) -> None:
    """Send small messages at once, and notice a host that is cut off."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        # 5 s of silence, then 5 probes 3 s apart: as many seconds.
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", 1000 * _UNREACHABLE),  # Linux
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
