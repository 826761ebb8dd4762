"""An inherited socket over which processes open streams: `Door`, `attended`.

Parent and child, which share one socket pair, need no address and no secret: the ends
of further pairs go through it as file descriptors. Nobody else can come.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import final

from jaxstrategy.launch._child_process import started
from jaxstrategy.parameter_servers.wire._stream import LARGEST, Stream, limit_silence

PATIENCE = 10.0
"""Seconds in which the other process must take what goes through a door."""

_STREAM, _DOOR = b"s", b"d"
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux


@final
class Door:
    """The end of those who ask; threads may share it.

    Args:
      sock: one end of a Unix socket pair; the other process calls `attended` on its.
      largest: bytes of a frame.
    """

    def __init__(self, sock: socket.socket, largest: int = LARGEST) -> None:
        # A process that is stopped takes some hundreds, and then none.
        limit_silence(sock, PATIENCE)
        self._sock = sock
        self._largest = largest
        self._lock = threading.Lock()

    def dial(self) -> Stream:
        """A new stream to the other process.

        Raises:
          OSError: it has ended.
        """
        return Stream(self._sent(_STREAM), largest=self._largest)

    def another(self) -> socket.socket:
        """The socket of a new door to the other process, for a third one.

        Raises:
          OSError: it has ended.
        """
        return self._sent(_DOOR)

    def close(self) -> None:
        """Close the door, which the other process sees; streams stay."""
        self._sock.close()

    def _sent(self, what: bytes) -> socket.socket:
        own, others = socket.socketpair()
        with others:
            try:
                with self._lock:
                    socket.send_fds(self._sock, [what], [others.fileno()])
            except BaseException as error:
                own.close()
                if isinstance(error, BlockingIOError):
                    raise TimeoutError("it takes no new connection") from None
                raise
        return own


def attended(
    sock: socket.socket, take: Callable[[Stream], None], largest: int = LARGEST
) -> None:
    """Give each stream that is opened to a function, until the other end closes.

    Args:
      sock: the other end of a `Door`; it is closed at the end.
      take: called in this thread, or in another for doors that were opened in turn.
      largest: bytes of a frame.
    """
    with sock:
        while True:
            try:
                what, given = _received(sock)
            except OSError:
                return
            if given is None:
                return
            if what == _STREAM:
                take(Stream(given, largest=largest))
            else:
                thread = threading.Thread(
                    target=attended,
                    args=(given, take, largest),
                    name="jaxstrategy door",
                    daemon=True,
                )
                if not started(thread):
                    given.close()


def _received(sock: socket.socket) -> tuple[bytes, socket.socket | None]:
    # One byte, so that one descriptor is taken at a time.
    what, descriptors, _, _ = socket.recv_fds(sock, 1, 1, _CLOSED_ON_EXEC)
    if not descriptors:
        return what, None
    os.set_inheritable(descriptors[0], False)
    return what, socket.socket(fileno=descriptors[0])
