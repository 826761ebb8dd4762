"""Connections that carry messages, and the addresses where they are made."""

from __future__ import annotations

import socket
import threading
import time

from jaxstrategy.cluster.connections._channel import Channel
from jaxstrategy.cluster.connections._fields import Json
from jaxstrategy.cluster.resolvers._addresses import address_of as address_of
from jaxstrategy.cluster.resolvers._addresses import endpoint as endpoint

# How long a host may be unreachable, in seconds, before the kernel gives it up. A
# stopped process is something else: its host still answers.
_UNREACHABLE = 20


class Connection:
    """A TCP connection that carries messages, for use with blocking calls."""

    def __init__(self, sock: socket.socket, channel: Channel) -> None:
        self.sock = sock
        self.channel = channel
        self._sending = threading.Lock()

    def send(self, message: Json) -> None:
        """Send one message; callable from any thread.

        Raises:
          OSError: the connection has ended.
          TypeError: the message cannot be written as JSON.
          ValueError: it is too large, or nested too deeply.
        """
        # A seal has the number of its message: what is packed first must be sent first.
        with self._sending:
            self.sock.sendall(self.channel.packed(message))

    def receive(self, deadline: float | None = None) -> Json:
        """The next message.

        Args:
          deadline: of `time.monotonic()`; by default there is none.

        Raises:
          TimeoutError: it did not come in time.
          EOFError: the other side closed the connection.
          OSError, ValueError: it broke; it carries something else.
        """
        while True:
            for message in self.channel.messages():
                return message
            self.channel.add(received(self.sock, deadline))

    def close(self) -> None:
        """End the connection, also for a thread that waits in `receive`."""
        try:
            # On Linux, `close` alone does not wake a thread that waits in `recv`.
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster
        self.sock.close()


def received(sock: socket.socket, deadline: float | None = None) -> bytes:
    """Some bytes, as soon as there are any.

    Raises:
      TimeoutError: none came in time.
      EOFError: the other side closed the connection.
      OSError: it broke.
    """
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
    data = sock.recv(1 << 16)
    if not data:
        raise EOFError
    return data


def tune(sock: socket.socket) -> None:
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
