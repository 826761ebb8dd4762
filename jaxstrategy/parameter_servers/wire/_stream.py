"""A connection that carries frames: `Stream`."""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
from typing import NamedTuple, final

import numpy as np

from jaxstrategy.parameter_servers.wire import _frame, _receive_buffers
from jaxstrategy.parameter_servers.wire._frame import FrameError, Lengths, WireFrame
from jaxstrategy.parameter_servers.wire._receive_buffers import ReceiveBuffers
from jaxstrategy.processes._channel import Message

LARGEST = 1 << 38
"""Bytes of a frame, if nothing else is said."""
_SEAL_BYTES = 32
_SEQUENCE = struct.Struct(">Q")
_AHEAD = 1 << 16  # bytes that one call of the kernel may read of small frames
_MOST_PARTS = 1000  # of one `sendmsg`; Linux allows 1024


class Keys(NamedTuple):
    """Keys of the seals of both directions, of one connection."""

    outgoing: bytes
    incoming: bytes


@final
class Stream:
    """Sends and receives frames; any thread may send, one at a time may receive.

    Args:
      sock: a connected socket, which the stream closes.
      keys: of a connection that others could write to.
      is_trusted: whether the other end may say what is executed here: it has proved to
        be of the job, or nobody else can have that end.
      largest: bytes of a frame.
      buffers: memory for arrays.

    Attributes:
      heard: what the other end said of itself in the handshake.
    """

    def __init__(
        self,
        sock: socket.socket,
        keys: Keys | None = None,
        is_trusted: bool = True,
        largest: int = LARGEST,
        buffers: ReceiveBuffers = _receive_buffers.SHARED,
    ) -> None:
        sock.settimeout(None)
        self.is_trusted = is_trusted
        self.heard: Message = {}
        self._sock = sock
        self._keys = keys
        self._largest = self._largest_received = largest
        self._largest_head = _frame.LARGEST_HEAD
        self._buffers = buffers
        self._sending = threading.Lock()
        self._sent = self._received = 0
        self._ahead = memoryview(bytearray(_AHEAD))
        self._start = self._end = 0
        self._is_closed = False
        self._process = os.getpid()

    def fileno(self) -> int:
        """The number of the socket; -1 when it is closed."""
        return self._sock.fileno()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def limit_silence(self, seconds: float | None) -> None:
        """Let `send` and `receive` fail when no byte moves for so long."""
        limit_silence(self._sock, seconds)

    def limit_received(self, head: int, whole: int) -> None:
        """Refuse what is larger, for the sake of memory: JSON takes 30 times its size.

        Args:
          head: bytes of a frame before the contents of its arrays.
          whole: bytes of a frame.
        """
        self._largest_head, self._largest_received = head, whole

    def send(self, frame: WireFrame) -> None:
        """Send a frame; its arrays must not change meanwhile.

        Raises:
          FrameError, TypeError: it cannot be sent; nothing was.
          TimeoutError: the other end takes nothing.
          OSError: the connection has ended.
        """
        head, contents = _frame.packed(frame, self._largest)
        with self._sending:
            self._write([self._sealed(head), *contents])

    def send_if_idle(self, frame: WireFrame) -> None:
        """Send a small frame, or nothing if this would have to wait.

        Raises:
          OSError: the connection has ended.
        """
        if not self._sending.acquire(blocking=False):
            return
        try:
            head, _ = _frame.packed(frame, self._largest)
            self._write_at_once(self._sealed(head))
        finally:
            self._sending.release()

    def receive(self) -> WireFrame:
        """The next frame.

        Raises:
          EOFError: the other end closed the connection, between two frames.
          FrameError: what came is no frame of the other end's.
          TimeoutError: nothing came for too long.
          OSError: the connection has ended.
        """
        if self._start == self._end:
            self._start = 0
            self._end = self._read(self._ahead, is_between=True)
        head = self._bytes(_frame.HEAD.size)
        found = _frame.lengths(head, self._largest_received, self._largest_head)
        try:
            rest = self._opened(head, found)
            fields, blob, types = _frame.unpacked(found, rest)
            arrays = [self._array(*each) for each in types]
        except MemoryError:
            raise FrameError("a message is larger than the memory") from None
        return WireFrame(found.kind, fields, blob, arrays)

    def close(self) -> None:
        """End the connection, also for threads that send or receive; once is enough."""
        self._is_closed = True
        try:
            # On Linux, `close` alone does not wake a thread that waits in `recv`. In a
            # fork it must not end the connection of the parent.
            if os.getpid() == self._process:
                self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster
        self._sock.close()

    def _sealed(self, head: bytes) -> bytes:
        """What is sent before the contents; it must be sent next."""
        if self._keys is None:
            return head
        seal = _seal(self._keys.outgoing, self._sent, head)
        self._sent += 1
        return head + seal

    def _opened(self, head: bytes, found: Lengths) -> bytes:
        """What follows a head, if the other end has sealed it."""
        if self._keys is None:
            return self._bytes(found.rest) if found.rest else b""
        data = self._bytes(found.rest + _SEAL_BYTES)
        rest, seal = data[: found.rest], data[found.rest :]
        expected = _seal(self._keys.incoming, self._received, head + rest)
        # In constant time: that of `==` tells how many bytes of a guess are right.
        if not hmac.compare_digest(seal, expected):
            raise FrameError("a message has another seal than the job's")
        self._received += 1
        return rest

    def _write(self, parts: list[bytes | memoryview]) -> None:
        size = sum(map(len, parts))
        while True:
            try:
                sent = self._sock.sendmsg(parts[:_MOST_PARTS])
            except BlockingIOError:
                raise TimeoutError("the other end takes nothing") from None
            size -= sent
            if not size:
                return
            _drop(parts, sent)

    def _write_at_once(self, data: bytes) -> None:
        try:
            sent = self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._sent -= self._keys is not None
            return
        if sent < len(data):
            self._write([data[sent:]])

    def _array(self, dtype: np.dtype, shape: tuple[int, ...], size: int) -> np.ndarray:
        if size <= self._end - self._start:
            memory = bytearray(self._ahead[self._start : self._start + size])
            self._start += size
        else:
            memory = self._buffers.take(size)
            self._into(memory.data)
        return np.ndarray(shape, dtype, memory)

    def _bytes(self, size: int) -> bytes:
        if self._end - self._start < size:
            if size > _AHEAD:
                data = bytearray(size)
                self._into(memoryview(data))
                return bytes(data)
            self._fill(size)
        start = self._start
        self._start = end = start + size
        return bytes(self._ahead[start:end])

    def _fill(self, size: int) -> None:
        """Read ahead, so many bytes at least."""
        left = bytes(self._ahead[self._start : self._end])
        self._ahead[: len(left)] = left
        self._start, self._end = 0, len(left)
        while self._end < size:
            self._end += self._read(self._ahead[self._end :])

    def _into(self, target: memoryview) -> None:
        """Fill memory: with what was read ahead, then from the socket."""
        at = min(len(target), self._end - self._start)
        target[:at] = self._ahead[self._start : self._start + at]
        self._start += at
        while at < len(target):
            at += self._read(target[at:])

    def _read(self, target: memoryview, is_between: bool = False) -> int:
        try:
            count = self._sock.recv_into(target)
        except BlockingIOError:
            raise TimeoutError("the other end says nothing") from None
        if not count:
            if is_between:
                raise EOFError("the connection was closed")
            raise ConnectionResetError("the connection ended within a message")
        return count


def pair(largest: int = LARGEST) -> tuple[Stream, Stream]:
    """Both ends of a connection within one process."""
    one, other = socket.socketpair()
    return Stream(one, largest=largest), Stream(other, largest=largest)


def limit_silence(sock: socket.socket, seconds: float | None) -> None:
    """Let calls of a blocking socket fail when no byte moves for so long."""
    # In the kernel: a timeout of Python's would cost another system call each time.
    # Nothing is for ever, a microsecond is the shortest.
    micro = 0 if seconds is None else max(1, int(seconds * 1e6))
    value = struct.pack("ll", *divmod(micro, 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _seal(key: bytes, sequence: int, data: bytes) -> bytes:
    return hmac.digest(key, _SEQUENCE.pack(sequence) + data, "sha256")


def _drop(parts: list[bytes | memoryview], sent: int) -> None:
    """Take what was sent out of the parts."""
    done = 0
    for part in parts:
        if sent < len(part):
            break
        sent -= len(part)
        done += 1
    del parts[:done]
    if sent:
        parts[0] = parts[0][sent:]
