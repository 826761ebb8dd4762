"""Messages between processes: JSON over TCP, each preceded by its length."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from typing import Any

from jaxstrategy.cluster._spec import host_and_port

_LENGTH = struct.Struct(">I")
LARGEST = 1 << 28  # bytes of a message; more is a stream that is not ours
# How long a host may be unreachable, in seconds, before the kernel gives it up. A
# stopped process is something else: its host still answers.
_UNREACHABLE = 20


def packed(message: Any) -> bytes:
    """A message as bytes.

    Raises:
      TypeError: it cannot be written as JSON.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


class Inbox:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, received: bytes) -> None:
        """Append what came in."""
        self._bytes += received

    def starts_with(self, prefix: bytes) -> bool | None:
        """Whether the stream begins so, None if too little has come to know."""
        known = min(len(prefix), len(self._bytes))
        if self._bytes[:known] != prefix[:known]:
            return False
        return True if known == len(prefix) else None

    def drop(self, count: int) -> None:
        """Forget the first `count` bytes."""
        del self._bytes[:count]

    def messages(self) -> list[Any]:
        """The messages that are complete; they are taken out.

        Raises:
          ValueError: these bytes are no messages.
        """
        found = []
        while len(self._bytes) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._bytes)
            if size > LARGEST:
                raise ValueError(f"a message of {size} bytes was announced")
            end = _LENGTH.size + size
            if len(self._bytes) < end:
                break
            found.append(json.loads(bytes(self._bytes[_LENGTH.size : end])))
            self.drop(end)
        return found


class Connection:
    """A TCP connection that carries messages, for use with blocking calls."""

    def __init__(self, sock: socket.socket, inbox: Inbox | None = None) -> None:
        self.sock = sock
        self.inbox = inbox or Inbox()
        self._ready: list[Any] = []
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send one message; callable from any thread.

        Raises:
          OSError: the connection has ended.
          TypeError: the message cannot be written as JSON.
        """
        data = packed(message)
        with self._sending:
            self.sock.sendall(data)

    def receive(self, deadline: float | None = None) -> Any:
        """The next message.

        Args:
          deadline: of `time.monotonic()`; by default there is none.

        Raises:
          TimeoutError: it did not come in time.
          EOFError: the other side closed the connection.
          OSError, ValueError: it broke; it carries something else.
        """
        while not self._ready:
            self._ready = self.inbox.messages()
            if not self._ready:
                self.fill(deadline)
        return self._ready.pop(0)

    def fill(self, deadline: float | None = None) -> None:
        """Wait for some bytes; raises as `receive` does."""
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.sock.settimeout(left)
        received = self.sock.recv(1 << 16)
        if not received:
            raise EOFError
        self.inbox.add(received)

    def close(self) -> None:
        """End the connection, also for a thread that waits in `receive`."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster
        self.sock.close()


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and notice a host that is cut off."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", 1000 * _UNREACHABLE),  # Linux
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def endpoint(address: str) -> tuple[str, int]:
    """Host and port as sockets want them; raises as `host_and_port`.

    >>> endpoint("[::1]:80"), endpoint("node7:2222")
    (('::1', 80), ('node7', 2222))
    """
    host, port = host_and_port(address)
    return host.removeprefix("[").removesuffix("]"), port


def address_of(host: str, port: int) -> str:
    """The opposite of `endpoint`.

    >>> address_of("::1", 80), address_of("node7", 2222)
    ('[::1]:80', 'node7:2222')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
