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
import importlib
import io
import math
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
from jaxstrategy._src.parameter_servers.protocol import aligned_empty
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.secret import Secret

LARGEST = 1 << 38
"""Bytes of a message, if nothing else is said."""
_LARGEST_PICKLE = 1 << 31  # bytes of it without its arrays
_HEAD = struct.Struct("<BIQ")  # mark, bytes of the pickle, bytes of the arrays
_MARK = 0xA7
_NO_HEAD = bytes(_HEAD.size)
_SEQUENCE = struct.Struct(">Q")
_SMALL = 1 << 12  # bytes of which a copy is faster than a view
_AHEAD = 1 << 16  # bytes that one call of the kernel may read of small messages
_MOST_PARTS = 1000  # of one `sendmsg`; Linux allows 1024
_PIECE = 1 << 20  # bytes that are sealed while they are in the processor's cache


class FrameError(ValueError):
    """What came is no message, or one that is too large."""


class Packed(NamedTuple):
    """A message as it is sent: head and pickle, and the contents of its arrays."""

    start: bytes | bytearray
    contents: list[memoryview]


def packed(value: object, largest: int = LARGEST) -> Packed:
    """A message; its arrays must not change before it is sent."""
    free = _packers.free
    packer = free.pop() if free else _Packer()  # packing may come to pack another
    try:
        start, contents = packer.packed(value)
    finally:
        free.append(packer)
    pickled, size = len(start) - _HEAD.size, sum(map(len, contents))
    if pickled > _LARGEST_PICKLE or pickled + size > largest:
        raise FrameError(
            f"A message of {pickled + size} bytes was to be sent; the largest may have "
            f"{min(largest, _LARGEST_PICKLE)}, or {largest} if most are in arrays. "
            "Send it in parts."
        )
    _HEAD.pack_into(start, 0, _MARK, pickled, size)
    return Packed(start, contents)


@final
class _Packer:
    """Pickles messages; to make it takes longer than a message does."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._contents: list[memoryview] = []
        self._pickler = pickle.Pickler(self._file, 5)
        # By type: `persistent_id` is asked about each object, which takes 1 us more.
        self._pickler.dispatch_table = {
            **copyreg.dispatch_table,
            np.ndarray: self._reduced,
        }

    def packed(self, value: object) -> tuple[bytearray, list[memoryview]]:
        """Room for a head, and the pickle; and what it leaves out."""
        self._file.write(_NO_HEAD)
        try:
            self._pickler.dump(value)
            return bytearray(self._file.getbuffer()), self._contents
        finally:  # nothing of it is kept
            self._contents = []
            self._pickler.clear_memo()
            self._file.seek(0)
            self._file.truncate()

    def _reduced(self, array: np.ndarray) -> Any:
        """An array, of numbers or truth values; without its contents if it is large."""
        if (name := _raw_name(array.dtype)) is None:
            return array.__reduce__()
        if not array.dtype.isnative:
            array = array.astype(name)
        if array.nbytes <= _SMALL:
            return _small_array, (name, array.shape, array.tobytes())
        # `memoryview` refuses the dtypes of ml_dtypes, so the bytes are shown.
        flat = np.ascontiguousarray(array).reshape(-1)
        self._contents.append(flat.view(np.uint8).data)
        return _large_array, (name, array.shape)


class _Packers(threading.local):
    """Those that this thread does not use now."""

    def __init__(self) -> None:
        self.free: list[_Packer] = []


_packers = _Packers()


def _small_array(name: str, shape: tuple[int, ...], data: bytes) -> np.ndarray:
    """An array whose contents are pickled with it."""
    return np.ndarray(shape, np.dtype(name), bytearray(data))


def _large_array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array whose contents come next over the stream that is read."""
    dtype = np.dtype(name)
    size = math.prod(shape) * dtype.itemsize
    _reading.left -= size
    if _reading.left < 0:
        raise FrameError("its arrays have another size than was announced")
    stream: Stream = _reading.stream
    memory = stream.buffers.take(size)
    stream.read_contents(memory.data)
    return np.ndarray(shape, dtype, memory)


_reading = threading.local()
"""The stream that this thread reads a message of, and the bytes of arrays left."""


@functools.cache
def _raw_name(dtype: np.dtype) -> str | None:
    """The name of a dtype whose arrays are raw bytes that mean the same elsewhere."""
    is_raw = dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes"
    return dtype.name if is_raw else None


def _unpickled(data: bytes, contents: int, stream: Stream) -> Any:
    """The value of a message, whose arrays are read from the stream."""
    _reading.stream, _reading.left = stream, contents
    try:
        value = pickle.loads(data)
    except OSError:  # of the connection
        raise
    except MemoryError:
        raise FrameError("a message is larger than the memory") from None
    except Exception as error:  # of whatever was pickled
        raise FrameError(f"a message cannot be read: {error}") from error
    finally:
        _reading.stream = None
    if _reading.left:
        raise FrameError("the arrays of a message are fewer than was announced")
    return value


SMALLEST = 1 << 16
"""Bytes below which memory of malloc is as fast."""


class _BorrowedArray(weakref.ref):
    """Memory that somebody uses: as long as the array of it, or a view, lives."""

    __slots__ = ("memory",)
    memory: np.ndarray


@final
class ReceiveBuffers:
    """Memory for arrays, which comes back by itself."""

    def __init__(self, most: int = 1 << 29) -> None:
        self._most = most
        self.idle_bytes = 0  # that nobody uses now
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        self._returned: deque[np.ndarray] = deque()
        # By identity: a weak reference compares and hashes as what it refers to.
        self._borrowed: dict[int, _BorrowedArray] = {}

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
        borrowed = _BorrowedArray(array, self._give_back)
        borrowed.memory = memory
        self._borrowed[id(borrowed)] = borrowed
        return array

    def _give_back(self, borrowed: _BorrowedArray) -> None:
        self._borrowed.pop(id(borrowed), None)
        self._returned.append(borrowed.memory)
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


_ciphers: Any = None
with contextlib.suppress(ImportError):
    _ciphers = importlib.import_module("cryptography.hazmat.primitives.ciphers")
CONTENTS_SEAL = "aes-gmac" if _ciphers else "hmac-sha256"


@final
class _ContentsSeal:
    """The seal of the contents of one message's arrays.

    GMAC takes 7 to 14 GB/s, HMAC with SHA-256 0.7 to 1.7 on the same processor.
    """

    def __init__(self, key: bytes, number: int) -> None:
        own = hmac.digest(key, b"contents", "sha256")
        sequence = _SEQUENCE.pack(number)
        if _ciphers is None:
            sealing = hmac.new(own, sequence, "sha256")
            self.update: Callable[[Any], None] = sealing.update
            self.digest: Callable[[], bytes] = sealing.digest
            return
        mode = _ciphers.modes.GCM(sequence.rjust(12, b"\0"))
        gmac = _ciphers.Cipher(_ciphers.algorithms.AES(own), mode).encryptor()
        self.update = gmac.authenticate_additional_data
        self.digest = lambda: gmac.finalize() or gmac.tag


class Keys(NamedTuple):
    """Keys of the seals of both directions, of one connection."""

    outgoing: bytes
    incoming: bytes


class _Incoming(io.RawIOBase):
    """What comes over a socket, as a file."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._sock.recv_into(buffer)
        except BlockingIOError:
            raise TimeoutError("the other end says nothing") from None


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
        self.buffers = buffers
        self._sock = sock
        self._keys = keys
        self._largest = largest
        self._sending = threading.Lock()
        self._sent = self._received = 0
        self._seal: _ContentsSeal | None = None  # of the message that is received
        self._incoming = io.BufferedReader(_Incoming(sock), _AHEAD)
        self._is_closed = False
        self._process = os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def limit_silence(self, seconds: float | None) -> None:
        """Let `send` and `receive` fail when no byte moves for so long."""
        # In the kernel: a timeout of Python's would cost another system call each time.
        # Nothing is for ever, a microsecond is the shortest.
        micro = 0 if seconds is None else max(1, int(seconds * 1e6))
        value = struct.pack("ll", *divmod(micro, 1_000_000))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, value: object) -> None:
        """Send a message."""
        self.send_packed(packed(value, self._largest))

    def send_packed(self, message: Packed) -> None:
        """Send a message that was packed before."""
        with self._sending:
            self._write(self._sealed(message))

    def send_if_idle(self, message: Packed) -> None:
        """Send a small message, or nothing if this would have to wait."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            (data,) = self._sealed(message)
            try:
                sent = self._sock.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._sent -= 1
                return
            if sent < len(data):
                self._write([data[sent:]])
        finally:
            self._sending.release()

    def receive(self) -> Any:
        """The next message."""
        head = self._incoming.read(_HEAD.size)
        if not head:
            raise EOFError("the connection was closed")
        if len(head) < _HEAD.size:
            raise ConnectionResetError("the connection ended within a message")
        mark, size, contents = _HEAD.unpack(head)
        if mark != _MARK:
            raise FrameError("what came is no message of this protocol")
        if size > _LARGEST_PICKLE or size + contents > self._largest:
            raise FrameError(f"a message of {size + contents} bytes was announced")
        data = self._exactly(size)
        if self._keys is None:
            return _unpickled(data, contents, self)
        key, number = self._keys.incoming, self._received
        self._received += 1
        self._check_seal(_seal(key, number, head + data))
        if not contents:
            return _unpickled(data, contents, self)
        self._seal = _ContentsSeal(key, number)
        value = _unpickled(data, contents, self)
        self._check_seal(self._seal.digest())
        return value

    def read_contents(self, target: memoryview) -> None:
        """Fill memory with the contents of an array."""
        for start in range(0, len(target), _PIECE):
            piece = target[start : start + _PIECE]
            if self._incoming.readinto(piece) < len(piece):
                raise ConnectionResetError("the connection ended within a message")
            if self._seal is not None:
                self._seal.update(piece)

    def close(self) -> None:
        """End the connection, also for threads that send or receive; once is enough."""
        self._is_closed = True
        # On Linux, `close` alone does not wake a thread that waits in `recv`. In a fork
        # it must not end the connection of the parent.
        if os.getpid() == self._process:
            _shut(self._sock)
        self._sock.close()

    def _sealed(self, message: Packed) -> list[bytes | bytearray | memoryview]:
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
            for first in range(0, len(each), _PIECE):
                seal.update(each[first : first + _PIECE])
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

    def _write(self, parts: list[bytes | bytearray | memoryview]) -> None:
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


def _seal(key: bytes, sequence: int, data: bytes | bytearray) -> bytes:
    return hmac.digest(key, _SEQUENCE.pack(sequence) + data, "sha256")


# The handshake.

SECONDS = 10.0
"""The time for a handshake."""

_GREETING = f"jaxstrategy-frames/5 {sys.byteorder} {CONTENTS_SEAL}\n".encode()
"""The first bytes on each connection, both ways, before a nonce."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_REFUSAL = bytes(_PROOF_BYTES)  # the host's answer to a wrong proof; anybody may say so


class _AnotherSecretError(ValueError):
    """The other side does not know the secret of this one."""


def _proven(sock: socket.socket, secret: Secret, is_host: bool) -> Stream:
    """The stream of a connection, once both sides have proved that they are of the job.

    The guest first, so that strangers get nothing that they could try words on.
    """
    end = time.monotonic() + SECONDS
    sock.settimeout(SECONDS)
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
            raise ValueError(f"it says {data[:40]!r}, not {greeting!r}")
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
    """

    def __init__(self, address: str, secret: Secret | None = None) -> None:
        self._secret = secret
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
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._is_closed = False

    def start(self, take: Callable[[Stream], None]) -> None:
        """Call a function with the stream of each that connects, in its own thread."""
        self._in_thread(self._sock, lambda: self._accept(take))

    def close(self) -> None:
        """Listen no more; streams that were made stay. Once is enough."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            left = dict(self._threads)
        for sock in (self._sock, *left.values()):
            _shut(sock)  # wakes who waits for it
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
            with self._lock:
                strangers = list(self._threads.values())[1:]  # and the own socket
            if len(strangers) > _MOST_STRANGERS:
                _shut(strangers[0])  # who came first
            self._in_thread(sock, functools.partial(self._welcome, sock, take))

    def _welcome(self, sock: socket.socket, take: Callable[[Stream], None]) -> None:
        try:
            if self._secret is None:
                stream = Stream(sock)
            else:
                _tune(sock)
                stream = _proven(sock, self._secret, is_host=True)
        except (EOFError, OSError, ValueError):
            sock.close()
            return
        with self._lock:
            # `close` must not end what is no stranger's any more, nor wait for it.
            del self._threads[threading.current_thread()]
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


def dialled(address: str, secret: Secret | None = None) -> Stream:
    """The stream of a new connection to a `Listener`."""
    if secret is None:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(SECONDS)  # a process that is stopped takes some hundreds
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
        return Stream(sock)
    try:
        sock = _connected(address, secret)
    except OSError as error:
        why = error.strerror or error
        raise ConnectionError(f"{address} does not answer ({why})") from error
    try:
        return _proven(sock, secret, is_host=False)
    except BaseException as error:
        sock.close()
        if isinstance(error, EOFError | OSError):
            raise ConnectionError(f"{address} does not answer ({error})") from error
        if isinstance(error, _AnotherSecretError):
            own = "has one" if secret else "has none"
            raise ClusterError(
                f"The process that listens at {address} has another {_secret.VARIABLE} "
                f"than this one, which {own}. Give all processes of the job the same."
            ) from error
        if isinstance(error, ValueError):
            raise ClusterError(
                f"What listens at {address} is no process of a job of this version: "
                f"{error}."
            ) from error
        raise


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
