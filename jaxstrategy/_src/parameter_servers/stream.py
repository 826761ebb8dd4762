"""Streams of messages between coordinator, workers and servers, and who may open one.

A message is a pickled value; the contents of its arrays follow as raw bytes, into
memory that is used again once nothing refers to it. Between hosts both sides prove
first that they know the secret of the job. Each pickle has a seal that is checked
before it is loaded, and the contents of the arrays have another one, checked before
anybody gets the message. Within a host a socket lies in a folder that only its user
enters.
"""

from __future__ import annotations

import contextlib
import copyreg
import errno
import functools
import hmac
import importlib.util
import io
import os
import pickle
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, final

import ml_dtypes  # noqa: F401  # makes names such as "bfloat16" known to NumPy
import numpy as np

from jaxstrategy._src.cluster.resolvers.cluster_spec import endpoint
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.launch.child_process import started
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.secret import Secret
from jaxstrategy._src.values.memory import aligned_empty

LARGEST = 1 << 38
"""Bytes of a message, if nothing else is said."""
_LARGEST_PICKLE = 1 << 31  # bytes of it without its arrays
_MOST_ARRAYS = 1 << 20
_HEAD = struct.Struct("<BQIQ")  # mark, bytes of the pickle, arrays, bytes of all arrays
_MARK = 0xA8
_SEQUENCE = struct.Struct(">Q")
_SMALL = 1 << 12  # bytes: copying so few is faster than a view
_AHEAD = 1 << 16  # bytes that one call of the kernel may read of small messages
_MOST_PARTS = 1000  # of one `sendmsg`; Linux allows 1024
_TRIES = 4  # to receive something, before the other end is silent
_PIECE = 1 << 20  # bytes that are sealed while they are in the processor's cache


class FrameError(ValueError):
    """What came is no message, or one that is too large."""


class Packed(NamedTuple):
    """A message as it is sent: head, sizes and pickle; and the contents of arrays."""

    start: bytes
    contents: list[memoryview]


def packed(value: object, largest: int = LARGEST) -> Packed:
    """A message; its arrays must not change before it is sent."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = pickle.Pickler(file, 5, buffer_callback=buffers.append)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    contents = [buffer.raw() for buffer in buffers]
    sizes = list(map(len, contents))
    pickled, total = file.tell(), sum(sizes)
    if pickled > _LARGEST_PICKLE or pickled + total > largest:
        raise FrameError(
            f"A message of {pickled + total} bytes was to be sent; the largest may "
            f"have {min(largest, _LARGEST_PICKLE)}, or {largest} if most are in "
            "arrays. Send it in parts."
        )
    if len(sizes) > _MOST_ARRAYS:
        raise FrameError(
            f"A message of {len(sizes)} arrays was to be sent; the most is "
            f"{_MOST_ARRAYS}. Send it in parts."
        )
    head = _HEAD.pack(_MARK, pickled, len(sizes), total)
    lengths = struct.pack(f"<{len(sizes)}Q", *sizes)
    return Packed(b"".join((head, lengths, file.getbuffer())), contents)


def _reduced(array: np.ndarray) -> Any:
    """An array, of numbers or truth values; without its contents if it is large."""
    if (name := _raw_name(array.dtype)) is None:
        return array.__reduce__()
    if not array.dtype.isnative:
        array = array.astype(name)
    if array.nbytes <= _SMALL:
        return _array, (name, array.shape, bytearray(array.tobytes()))
    # The dtypes of ml_dtypes have no buffers of their own, so the bytes are shown.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return _array, (name, array.shape, pickle.PickleBuffer(flat))


# By type: `persistent_id` is asked about each object, which takes 1 us more.
_REDUCERS = {**copyreg.dispatch_table, np.ndarray: _reduced}


def _array(name: str, shape: tuple[int, ...], data: Any) -> np.ndarray:
    # What was read-only where it was sent comes as such; the memory is this one's own.
    memory = data.obj if isinstance(data, memoryview) else data
    return np.ndarray(shape, np.dtype(name), memory)


@functools.cache
def _raw_name(dtype: np.dtype) -> str | None:
    """The name of a dtype whose arrays are raw bytes that mean the same elsewhere."""
    is_raw = dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes"
    return dtype.name if is_raw else None


SMALLEST = 1 << 16
"""Bytes below which memory of malloc is as fast."""


@final
class ReceiveBuffers:
    """Memory for arrays, which comes back by itself."""

    def __init__(self, most: int = 1 << 29) -> None:
        self._most = most
        self.idle_bytes = 0  # that nobody uses now
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        self._returned: deque[np.ndarray] = deque()

    def take(self, size: int) -> np.ndarray:
        """A vector of so many bytes, whatever they are."""
        if size < SMALLEST:
            return np.empty(size, np.uint8)
        # The next of eight sizes up to the next power of two.
        step = 1 << (size.bit_length() - 4)
        room = -(-size // step) * step
        with self._lock:
            self._sort_returned()
            memory = None
            if memories := self._idle.get(room):
                self.idle_bytes -= room
                self._idle.move_to_end(room)
                memory = memories.pop()
        if memory is None:
            memory = aligned_empty((room,), np.uint8)
        # NumPy collapses chains of views down to the array whose base is no array.
        array = np.frombuffer(memory.data, np.uint8, size)
        # As long as the array, or a view of it, lives, somebody uses the memory.
        weakref.finalize(array, self._give_back, memory).atexit = False
        return array

    def _give_back(self, memory: np.ndarray) -> None:
        self._returned.append(memory)
        # The collector may call this within any line of this class: it must not wait.
        if self._lock.acquire(blocking=False):
            try:
                self._sort_returned()
            finally:
                self._lock.release()

    def _sort_returned(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._idle.setdefault(memory.nbytes, []).append(memory)
            self.idle_bytes += memory.nbytes
        while self.idle_bytes > self._most:
            # Free some of the size that was not wanted for the longest time.
            room = next(iter(self._idle))
            if memories := self._idle[room]:
                self.idle_bytes -= memories.pop().nbytes
            else:
                del self._idle[room]


_buffers = ReceiveBuffers()


_has_gmac = importlib.util.find_spec("cryptography") is not None
CONTENTS_SEAL = "aes-gmac" if _has_gmac else "hmac-sha256"


@final
class _ContentsSeal:
    """The seal of the contents of one message's arrays.

    GMAC takes 7 to 14 GB/s, HMAC with SHA-256 0.7 to 1.7 on the same processor.
    """

    def __init__(self, key: bytes, number: int) -> None:
        own = hmac.digest(key, b"contents", "sha256")
        sequence = _SEQUENCE.pack(number)
        if not _has_gmac:
            sealing = hmac.new(own, sequence, "sha256")
            self._add: Callable[[Any], None] = sealing.update
            self.digest: Callable[[], bytes] = sealing.digest
            return
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        mode = modes.GCM(sequence.rjust(12, b"\0"))
        gmac = Cipher(algorithms.AES(own), mode).encryptor()
        self._add = gmac.authenticate_additional_data
        self.digest = lambda: gmac.finalize() or gmac.tag

    def add(self, contents: memoryview) -> None:
        for start in range(0, len(contents), _PIECE):
            self._add(contents[start : start + _PIECE])


class Keys(NamedTuple):
    """Keys of the seals of both directions, of one connection."""

    outgoing: bytes
    incoming: bytes


class _Incoming(io.RawIOBase):
    """What comes over a socket, as a file."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_idle = False  # between two messages

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        for _ in range(1 if self.is_idle else _TRIES):
            try:
                return self._sock.recv_into(buffer)
            except BlockingIOError:
                continue
        raise TimeoutError("the other end says nothing")


@final
class Stream:
    """Sends and receives messages; any thread may send, one at a time may receive.

    The other end of it is known to be of the job, because what it sends is unpickled.
    """

    def __init__(
        self,
        sock: socket.socket,
        keys: Keys | None = None,
        largest: int = LARGEST,
        buffers: ReceiveBuffers = _buffers,
    ) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._keys = keys
        self._largest = largest
        self._buffers = buffers
        self._sending = threading.Lock()
        self._sent = self._received = 0
        self._raw = _Incoming(sock)
        self._incoming = io.BufferedReader(self._raw, _AHEAD)
        self._process = os.getpid()

    def limit_silence(self, seconds: float | None) -> None:
        """Let `send` and `receive` fail when no byte moves for so long."""
        # In the kernel: a timeout of Python's would cost another system call each time.
        # Nothing is for ever, a microsecond is the shortest.
        for option, tries in ((socket.SO_RCVTIMEO, _TRIES), (socket.SO_SNDTIMEO, 1)):
            micro = 0 if seconds is None else max(1, int(seconds / tries * 1e6))
            value = struct.pack("ll", *divmod(micro, 1_000_000))
            self._sock.setsockopt(socket.SOL_SOCKET, option, value)

    def send(self, value: object) -> None:
        """Send a message."""
        self.send_packed(packed(value, self._largest))

    def send_packed(self, message: Packed) -> None:
        """Send a message that was packed before."""
        with self._sending:
            self._write(self._sealed(message))

    def is_silent(self) -> bool:
        """Whether nothing comes for a quarter of the longest silence."""
        self._raw.is_idle = True
        try:
            self._incoming.peek(1)
        except TimeoutError:
            return True
        finally:
            self._raw.is_idle = False
        return False

    def receive(self) -> Any:
        """The next message."""
        head = self._incoming.read(_HEAD.size)
        if not head:
            raise EOFError("the connection was closed")
        if len(head) < _HEAD.size:
            raise ConnectionResetError("the connection ended within a message")
        mark, pickled, count, total = _HEAD.unpack(head)
        if mark != _MARK:
            raise FrameError("what came is no message of this protocol")
        if (
            pickled > _LARGEST_PICKLE
            or count > _MOST_ARRAYS
            or pickled + total > self._largest
        ):
            raise FrameError(
                f"a message of {pickled + total} bytes in {count} arrays was announced"
            )
        data = memoryview(self._exactly(8 * count + pickled))
        contents_seal, number = None, self._received
        self._received += 1
        if self._keys is not None:
            self._check_seal(_seal(self._keys.incoming, number, head + data))
            if count:
                contents_seal = _ContentsSeal(self._keys.incoming, number)
        sizes = struct.unpack_from(f"<{count}Q", data)
        if sum(sizes) != total:
            raise FrameError("the arrays of a message have another size than announced")
        try:
            arrays = [self._contents(size, contents_seal) for size in sizes]
            if contents_seal is not None:
                self._check_seal(contents_seal.digest())
            return pickle.loads(data[8 * count :], buffers=arrays)
        except (OSError, FrameError):  # of the connection
            raise
        except MemoryError:
            raise FrameError("a message is larger than the memory") from None
        except Exception as error:  # of whatever was pickled
            raise FrameError(f"a message cannot be read: {error}") from error

    def close(self) -> None:
        """End the connection, also for threads that send or receive; once is enough."""
        # On Linux, `close` alone does not wake a thread that waits in `recv`. In a fork
        # it must not end the connection of the parent.
        if os.getpid() == self._process:
            _shut(self._sock)
        self._sock.close()

    def _sealed(self, message: Packed) -> list[bytes | memoryview]:
        """The parts of a message with their seals; it must be sent next."""
        start, contents = message
        number = self._sent
        self._sent += 1
        if self._keys is None:
            return [start, *contents]
        sealed = start + _seal(self._keys.outgoing, number, start)
        if not contents:
            return [sealed]
        seal = _ContentsSeal(self._keys.outgoing, number)
        for each in contents:
            seal.add(each)
        return [sealed, *contents, seal.digest()]

    def _check_seal(self, seal: bytes) -> None:
        # In constant time: that of `==` tells how many bytes of a guess are right.
        if not hmac.compare_digest(seal, self._exactly(len(seal))):
            raise FrameError("a message has another seal than the job's")

    def _exactly(self, size: int) -> bytes:
        data = self._incoming.read(size)
        if len(data) < size:
            raise ConnectionResetError("the connection ended within a message")
        return data

    def _contents(self, size: int, seal: _ContentsSeal | None) -> np.ndarray:
        """The contents of the next array."""
        memory = self._buffers.take(size)
        step = max(size, 1) if seal is None else _PIECE
        for start in range(0, size, step):
            piece = memory[start : start + step].data
            if self._incoming.readinto(piece) < len(piece):
                raise ConnectionResetError("the connection ended within a message")
            if seal is not None:
                seal.add(piece)
        return memory

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
            done = 0
            while sent >= len(parts[done]):
                sent -= len(parts[done])
                done += 1
            parts = [parts[done][sent:], *parts[done + 1 :]]


def _seal(key: bytes, sequence: int, data: bytes) -> bytes:
    return hmac.digest(key, _SEQUENCE.pack(sequence) + data, "sha256")


# The handshake.

SECONDS = 10.0
"""The time for a handshake, if nothing else is said."""

_GREETING = f"jaxstrategy-frames/7 {sys.byteorder} {CONTENTS_SEAL}\n".encode()
"""The first bytes on each connection, both ways, before a nonce."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_REFUSAL = bytes(_PROOF_BYTES)  # the host's answer to a wrong proof; anybody may say so


class _HandshakeError(ValueError):
    """The other side is no process of a job of this version."""


class _AnotherSecretError(_HandshakeError):
    """The other side does not know the secret of this one."""


def _proven(
    sock: socket.socket, secret: Secret, is_host: bool, seconds: float = SECONDS
) -> Stream:
    """The stream of a connection, once both sides have proved that they are of the job.

    The guest first, so that strangers get nothing that they could try words on.
    """
    end = time.monotonic() + seconds
    sock.settimeout(seconds)
    own = secrets.token_bytes(_NONCE_BYTES)
    if not is_host:
        sock.sendall(_GREETING + own)
    other = _received(sock, _NONCE_BYTES, end, _GREETING)
    if is_host:
        sock.sendall(_GREETING + own)
    # What makes the keys of a connection others than those of any other one.
    context = _GREETING + (other + own if is_host else own + other)
    of_guest = secret.key(context + b"proof of the guest")
    of_host = secret.key(context + b"proof of the host")
    if not is_host:
        sock.sendall(of_guest)
    # In constant time: that of `==` tells how many bytes of a guess are right.
    proof = _received(sock, _PROOF_BYTES, end)
    if not secrets.compare_digest(proof, of_guest if is_host else of_host):
        if is_host:
            sock.sendall(_REFUSAL)
        raise _AnotherSecretError("it has another secret")
    if is_host:
        sock.sendall(of_host)
    to_host = secret.key(context + b"guest to host")
    to_guest = secret.key(context + b"host to guest")
    return Stream(sock, Keys(to_guest, to_host) if is_host else Keys(to_host, to_guest))


def _received(
    sock: socket.socket, count: int, end: float, greeting: bytes = b""
) -> bytes:
    """The next bytes, after a greeting that must be this one from its first byte on."""
    data = b""
    while (left := len(greeting) + count - len(data)) > 0:
        seconds = end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(seconds)
        if not (more := sock.recv(left)):
            raise EOFError("it hung up")
        data += more
        if not greeting.startswith(data[: len(greeting)]):
            raise _HandshakeError(f"it says {data[:40]!r}, not {greeting!r}")
    return data[len(greeting) :]


# Who listens, and who calls.

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ECONNABORTED)
_PAUSE = 0.05  # while this process has too many files open
_MOST_STRANGERS = 64  # connections at once whose other end has not proved itself
_UNREACHABLE = 20  # seconds after which the kernel gives up a host that is cut off


@final
class Listener:
    """An address at which processes of the job connect, and nobody else.

    Args:
      address: `host:port`; or, without a secret, the path of a socket in a folder that
        only this user can enter.
      secret: of the job.
      take: called with the stream of each that connects, in its own thread.
    """

    def __init__(
        self, address: str, secret: Secret | None, take: Callable[[Stream], None]
    ) -> None:
        self._secret = secret
        self._take = take
        if secret is None:
            self._sock = socket.socket(socket.AF_UNIX)
            self._sock.bind(address)
            self._sock.listen()
        else:
            _secret.check_address(secret, address)
            found = socket.getaddrinfo(*endpoint(address), type=socket.SOCK_STREAM)
            family, *_, where = found[0]
            self._sock = socket.create_server(where, family=family)
        self._lock = threading.Lock()
        # Whose other ends have not proved themselves.
        self._strangers: list[socket.socket] = []
        self._is_closed = False
        self._thread = self._new_thread(self._accept)
        self._thread.start()

    def close(self) -> None:
        """Listen no more; streams that were made stay. Once is enough."""
        with self._lock:
            self._is_closed = True
            waited_for = [self._sock, *self._strangers]
        for sock in waited_for:
            _shut(sock)  # wakes who waits for it
        self._thread.join()
        self._sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if self._is_closed or error.errno not in _PASSING:
                    return
                time.sleep(_PAUSE)
                continue
            with self._lock:
                if self._is_closed:
                    sock.close()
                    return
                if not started(self._new_thread(self._welcome, sock)):
                    sock.close()
                    continue
                self._strangers.append(sock)
                if len(self._strangers) > _MOST_STRANGERS:
                    _shut(self._strangers[0])  # who came first

    def _welcome(self, sock: socket.socket) -> None:
        try:
            if self._secret is None:
                stream = Stream(sock)
            else:
                _tune(sock)
                stream = _proven(sock, self._secret, is_host=True)
        except (EOFError, OSError, _HandshakeError):
            sock.close()
            return
        finally:
            with self._lock:
                self._strangers.remove(sock)
        self._take(stream)

    def _new_thread(self, work: Callable[..., None], *args: object) -> threading.Thread:
        name = "jaxstrategy listener"
        return threading.Thread(target=work, args=args, name=name, daemon=True)


def dialled(
    address: str, secret: Secret | None = None, seconds: float = SECONDS
) -> Stream:
    """The stream of a new connection to a `Listener`, or a `ConnectionError`."""
    with contextlib.ExitStack() as closing:
        try:
            if secret is None:
                sock = closing.enter_context(socket.socket(socket.AF_UNIX))
                # A process that is stopped takes some hundreds.
                sock.settimeout(seconds)
                sock.connect(address)
                stream = Stream(sock)
            else:
                sock = closing.enter_context(_connected(address, secret, seconds))
                stream = _proven(sock, secret, False, seconds)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise ConnectionRefusedError(f"nobody listens at {address}") from error
        except (EOFError, OSError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConnectionError(f"{address} does not answer ({why})") from error
        except _AnotherSecretError as error:
            own = "has one" if secret else "has none"
            raise ClusterError(
                f"The process that listens at {address} has another {_secret.VARIABLE} "
                f"than this one, which {own}. Give all processes of the job the same."
            ) from error
        except _HandshakeError as error:
            raise ClusterError(
                f"What listens at {address} is no process of a job of this version: "
                f"{error}."
            ) from error
        closing.pop_all()
        return stream


def _connected(address: str, secret: Secret, seconds: float) -> socket.socket:
    host, port = endpoint(address)
    _secret.check(secret, host)
    sock = socket.create_connection((host, port), seconds)
    # While nobody listens, a call from this very port reaches itself.
    if sock.getsockname() == sock.getpeername():
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    _tune(sock)
    return sock


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
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
