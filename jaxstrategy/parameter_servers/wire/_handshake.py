"""Both ends of a new connection prove that they know the job's secret.

The proof is that of all connections of a job, a `Channel`: each end sends, sealed, the
name of this protocol and a new nonce. Of both nonces and the secret come the keys that
seal the frames of this one connection. So frames of another connection, of the other
direction or from before mean nothing here, and nothing is read as a frame, let alone
unpickled, before the other end has proved who it is.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Callable

from jaxstrategy._errors import ClusterError
from jaxstrategy.parameter_servers.wire._stream import LARGEST, Keys, Stream
from jaxstrategy.processes import _secret
from jaxstrategy.processes._channel import (
    NONCE_BYTES,
    REFUSAL,
    Connection,
    Fields,
    ForgedError,
    Greeting,
    Message,
    RefusedError,
    has,
    is_text,
    received,
)
from jaxstrategy.processes._secret import Secret

SECONDS = 10.0
"""The time for a handshake."""

_PROTOCOL = "jaxstrategy-frames/1 " + sys.byteorder


def _is_nonce(value: object) -> bool:
    try:
        return len(bytes.fromhex(value)) == NONCE_BYTES  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def _is_told(value: object) -> bool:
    return isinstance(value, dict)


_HELLO: Fields = {"protocol": is_text, "nonce": _is_nonce, "told": _is_told}
_REFUSED: Fields = {"protocol": is_text, "refused": is_text}


def nothing_told(heard: Message) -> Message:
    """Who calls may be anybody of the job, and is told nothing."""
    return {}


def welcomed(
    sock: socket.socket,
    secret: Secret,
    answer: Callable[[Message], Message] = nothing_told,
    seconds: float = SECONDS,
    largest: int = LARGEST,
) -> Stream:
    """The stream of a connection that somebody made to this process.

    The socket is the stream's, or closed.

    Args:
      answer: makes of what the other end says of itself what it is told; a
        `ClusterError` of it is raised there, too.

    Raises:
      ClusterError: it is nobody of the job, or of another version, or refused.
    """
    end = time.monotonic() + seconds
    greeting, nonce = Greeting(secret, is_host=True), secrets.token_bytes(NONCE_BYTES)
    try:
        connection = _host_greeted(sock, greeting, end)
        hello = _hello(connection, end)
        connection.send(_own_hello(nonce, _told(connection, hello, answer)))
    except (EOFError, OSError, ValueError) as error:
        if isinstance(error, ForgedError):
            _refuse(sock)
        sock.close()
        raise ClusterError(f"Somebody who called is none of the job: {error}") from None
    except BaseException:
        sock.close()
        raise
    nonces = bytes.fromhex(hello["nonce"]), nonce
    stream = _stream(sock, secret, nonces, is_host=True, largest=largest)
    stream.heard = hello["told"]
    return stream


def greeted(
    sock: socket.socket,
    secret: Secret,
    where: str,
    told: Message | None = None,
    seconds: float = SECONDS,
    largest: int = LARGEST,
) -> Stream:
    """The stream of a connection that this process has made.

    The socket is the stream's, or closed.

    Args:
      where: the address, for messages.
      told: what the other end shall know of this one.

    Raises:
      ClusterError: the other end is not of the job, or of another version, or refuses.
      ConnectionError: it closed the connection, or does not answer.
    """
    end = time.monotonic() + seconds
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        connection = _guest_greeted(sock, Greeting(secret, is_host=False), end)
        connection.send(_own_hello(nonce, told or {}))
        hello = _hello(connection, end)
    except BaseException as error:
        sock.close()
        if isinstance(error, EOFError | OSError):
            raise ConnectionError(f"{where} does not answer ({error})") from error
        if isinstance(error, ValueError):
            raise _stranger(where, secret, error) from error
        raise
    nonces = nonce, bytes.fromhex(hello["nonce"])
    stream = _stream(sock, secret, nonces, is_host=False, largest=largest)
    stream.heard = hello["told"]
    return stream


def _host_greeted(sock: socket.socket, greeting: Greeting, end: float) -> Connection:
    while (channel := greeting.add(received(sock, end))) is None:
        pass
    sock.sendall(greeting.own)
    return Connection(sock, channel)


def _guest_greeted(sock: socket.socket, greeting: Greeting, end: float) -> Connection:
    sock.settimeout(max(0.01, end - time.monotonic()))
    sock.sendall(greeting.own)
    while (channel := greeting.add(received(sock, end))) is None:
        pass
    return Connection(sock, channel)


def _own_hello(nonce: bytes, told: Message) -> Message:
    return {"protocol": _PROTOCOL, "nonce": nonce.hex(), "told": told}


def _told(
    connection: Connection, hello: Message, answer: Callable[[Message], Message]
) -> Message:
    try:
        return answer(hello["told"])
    except ClusterError as error:
        connection.send({"protocol": _PROTOCOL, "refused": str(error)})
        raise


def _hello(connection: Connection, end: float) -> Message:
    hello = connection.receive(end)
    if has(hello, _REFUSED):
        raise ClusterError(hello["refused"])
    if not has(hello, _HELLO):
        raise ValueError("it says something else than hello")
    if hello["protocol"] != _PROTOCOL:
        raise ValueError(f"it speaks {hello['protocol'][:40]!r}, not {_PROTOCOL!r}")
    return hello


def _stream(
    sock: socket.socket,
    secret: Secret,
    nonces: tuple[bytes, bytes],
    is_host: bool,
    largest: int,
) -> Stream:
    context = b"".join((_PROTOCOL.encode(), b"\n", *nonces))
    to_host = secret.key(context + b"guest to host")
    to_guest = secret.key(context + b"host to guest")
    keys = Keys(to_guest, to_host) if is_host else Keys(to_host, to_guest)
    return Stream(sock, keys, _is_trusted(sock, secret), largest)


def _is_trusted(sock: socket.socket, secret: Secret) -> bool:
    """Whether who has passed the handshake is of the job.

    Without a secret, another user of this host could have connected over loopback, but
    not to a Unix socket in a directory of the user's own.
    """
    is_unix = sock.family == socket.AF_UNIX
    return bool(secret) or is_unix or _secret.is_network_trusted()


def _refuse(sock: socket.socket) -> None:
    try:
        sock.sendall(REFUSAL)
    except OSError:
        pass  # it is not waiting for it


def _stranger(where: str, secret: Secret, error: ValueError) -> ClusterError:
    if not isinstance(error, ForgedError | RefusedError):
        return ClusterError(
            f"What listens at {where} is no process of a job of this version: {error}."
        )
    own = "has one" if secret else "has none"
    return ClusterError(
        f"The process that listens at {where} has another {_secret.VARIABLE} than this "
        f"one, which {own}. Give all processes of the job the same."
    )
