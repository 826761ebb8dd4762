"""Authenticated messages over raw sockets: JSON with a length and a seal."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeGuard, final

from jaxstrategy._src.processes.secret import Secret

Json: TypeAlias = Any
"""A value of JSON. Its reader checks its form with `has`."""
Message: TypeAlias = dict[str, Json]
"""An object of JSON whose fields were checked."""
IsRight: TypeAlias = Callable[[object], bool]
"""Whether the value of a field may be that."""
Fields: TypeAlias = Mapping[str, IsRight]
"""The fields that a message must have; it may have others."""

_LONGEST_NAME = 1000  # of a host or a job


def has(message: object, fields: Fields) -> TypeGuard[Message]:
    """Whether a message has these fields, with values as they may be."""
    return isinstance(message, dict) and all(
        name in message and is_right(message[name]) for name, is_right in fields.items()
    )


def is_one_of(message: object, known: Mapping[str, Fields]) -> TypeGuard[Message]:
    """Whether a message has the fields of the operation that it names as `op`."""
    op = message.get("op") if isinstance(message, dict) else None
    fields = known.get(op) if isinstance(op, str) else None
    return fields is not None and has(message, fields)


def is_text(value: object) -> bool:
    """Whether it is a string."""
    return isinstance(value, str)


def is_name(value: object) -> bool:
    """Whether it is a string of a sensible length."""
    return isinstance(value, str) and len(value) <= _LONGEST_NAME


def is_whole(value: object) -> bool:
    """Whether it is a whole number from 0 on."""
    # JSON has numbers of any length, sockets and clocks have not.
    return type(value) is int and 0 <= value < 1 << 63


def is_seconds(value: object) -> bool:
    """Whether it is a time that clocks and locks can wait for."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (0 <= value < 1e9)
    )


def is_anything(value: object) -> bool:
    """Always: users say it to each other."""
    return True


def or_none(is_right: IsRight) -> IsRight:
    """Whether it is right or null."""
    return lambda value: value is None or is_right(value)


def row(*kinds: IsRight) -> IsRight:
    """Whether it is a list of values of these kinds."""

    def is_row(value: object) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(kinds)
            and all(is_right(each) for is_right, each in zip(kinds, value, strict=True))
        )

    return is_row


def rows(is_right: IsRight) -> IsRight:
    """Whether it is a list, each entry of which is right."""
    return lambda value: isinstance(value, list) and all(map(is_right, value))


GREETING = b"jaxstrategy-meeting/2\n"
"""The first bytes on each connection, both ways: nothing else begins so."""
NONCE_BYTES = 32
FIRST = 1 << 16
"""Bytes of the first message, whose sender is still unknown."""
LARGEST = 1 << 28
"""Bytes of any other message to the host."""
DEEPEST = 100
"""Levels of nesting; the stack of the thread that reads is not deep."""

_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_SEAL_BYTES = 32
_REFUSAL = (1 << 32) - 1  # a length that no message has
REFUSAL = _LENGTH.pack(_REFUSAL)
"""The host's answer, instead of a message, to a guest without the secret."""


class ForgedError(ValueError):
    """A message was not made here and now by who knows the secret."""


class RefusedError(ValueError):
    """The host says that this side does not know the secret. Anybody could say so."""


@final
class Channel:
    """One side of a stream of messages, without its socket.

    Args:
      is_host: whether this is the side of process 0.
      is_proved: whether both sides know each other already.
    """

    def __init__(
        self,
        secret: Secret,
        guests_nonce: bytes,
        hosts_nonce: bytes,
        is_host: bool,
        is_proved: bool = False,
    ) -> None:
        context = GREETING + guests_nonce + hosts_nonce
        to_host = secret.key(context + b"guest to host")
        to_guest = secret.key(context + b"host to guest")
        self._out, self._in = (to_guest, to_host) if is_host else (to_host, to_guest)
        # An answer to a gather has what all processes contributed, in a list.
        limits = (LARGEST, DEEPEST), (_REFUSAL - 1, DEEPEST + 2)
        self._limits_in, self._limits_out = limits if is_host else limits[::-1]
        self._sent = self._opened = int(is_proved)
        self._bytes = bytearray()

    @property
    def is_proved(self) -> bool:
        """Whether the other side has proved that it knows the secret."""
        return self._opened > 0

    def packed(self, message: Json) -> bytes:
        """A message as the next bytes to send; they must be sent in this order."""
        largest, deepest = self._limits_out
        body = _written(message, deepest)
        largest = largest if self._sent else FIRST
        if len(body) > largest:
            raise ValueError(
                f"A message has {len(body)} bytes; processes tell each other up to "
                f"{largest} at once. Values of steps belong into arrays."
            )
        frame = _LENGTH.pack(len(body)) + body
        seal = _seal(self._out, self._sent, frame)
        self._sent += 1
        return frame + seal

    def add(self, received: bytes) -> None:
        """Append what came in."""
        self._bytes += received

    def messages(self) -> Iterator[Json]:
        """The messages that are complete, each taken out when it is given."""
        while (frame := self._next()) is not None:
            yield _read(frame[_LENGTH.size :], self._limits_in[1])

    def _next(self) -> bytes | None:
        """The next message with its length, checked; None before it is complete."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._bytes)
        if size == _REFUSAL and not self.is_proved:
            raise RefusedError
        if size > (self._limits_in[0] if self.is_proved else FIRST):
            raise ValueError(f"a message of {size} bytes was announced")
        end = _LENGTH.size + size
        if len(self._bytes) < end + _SEAL_BYTES:
            return None
        frame = bytes(self._bytes[:end])
        seal = bytes(self._bytes[end : end + _SEAL_BYTES])
        # In constant time: that of `==` tells how many bytes of a guess are right.
        if not hmac.compare_digest(seal, _seal(self._in, self._opened, frame)):
            raise ForgedError("a message is not of the job")
        self._opened += 1
        del self._bytes[: end + _SEAL_BYTES]
        return frame


@final
class Greeting:
    """The first bytes of both sides, and the channel made from them.

    Attributes:
      own: the bytes to send, for the host once `add` has given a channel.
    """

    def __init__(self, secret: Secret, is_host: bool) -> None:
        self._secret = secret
        self._is_host = is_host
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._replies = bytearray()
        self.own = GREETING + self._nonce

    def add(self, received: bytes) -> Channel | None:
        """Take in what came; the channel when the other side has greeted."""
        self._replies += received
        if not GREETING.startswith(self._replies[: len(GREETING)]):
            raise ValueError("this is no greeting")
        end = len(GREETING) + NONCE_BYTES
        if len(self._replies) < end:
            return None
        nonces = self._nonce, bytes(self._replies[len(GREETING) : end])
        guests, hosts = nonces[::-1] if self._is_host else nonces
        channel = Channel(self._secret, guests, hosts, self._is_host)
        channel.add(bytes(self._replies[end:]))
        return channel


def pair() -> tuple[Channel, Channel]:
    """The guest's and the host's channel of a connection within one process."""
    # Nobody else has an end of a socket pair, so that nothing needs to be secret.
    secret, nonce = Secret(), bytes(NONCE_BYTES)
    guests, hosts = (Channel(secret, nonce, nonce, k, True) for k in (False, True))
    return guests, hosts


def _seal(key: bytes, number: int, frame: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + frame, "sha256")


def _written(message: Json, deepest: int) -> bytes:
    deep = f"A message is nested more than {deepest} levels deep. Give a flat list."
    try:
        text = json.dumps(message, separators=(",", ":"))
    except RecursionError:
        raise ValueError(deep) from None
    if _depth(text, message, deepest) > deepest:
        raise ValueError(deep)
    return text.encode()


def _read(body: bytes, deepest: int) -> Json:
    try:
        text = body.decode()
        message = json.loads(text)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if _depth(text, message, deepest) > deepest:
        raise ValueError("a message is nested too deeply")
    return message


def _depth(text: str, message: Json, most: int) -> int:
    """The depth of a message, or an upper bound of it below `most`.

    What is deeper could be read, and yet not be written again by a thread whose own
    stack is deeper.
    """
    if (brackets := text.count("[") + text.count("{")) <= most:
        return brackets
    depth, level = 0, _containers([message])
    while level and depth <= most:
        depth += 1
        level = [child for part in level for child in _containers(part)]
    return depth


def _containers(part: Json) -> list[Json]:
    children = part.values() if isinstance(part, dict) else part
    return [child for child in children if isinstance(child, list | tuple | dict)]


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
        """Send one message; callable from any thread."""
        # A seal has the number of its message: what is packed first must be sent first.
        with self._sending:
            self.sock.sendall(self.channel.packed(message))

    def receive(self, deadline: float | None = None) -> Json:
        """The next message."""
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
    """Some bytes, as soon as there are any."""
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
