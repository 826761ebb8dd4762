"""Frames between processes, the streams that carry them, and doors to open streams."""

from __future__ import annotations

import enum
import hmac
import json
import os
import socket
import struct
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import ml_dtypes  # noqa: F401  # makes names such as "bfloat16" known to NumPy
import numpy as np

from jaxstrategy._src.launch.child_process import started
from jaxstrategy._src.parameter_servers.protocol import aligned_empty

# noqa: F401  # makes names such as "bfloat16" known to NumPy


# The position is the code that is sent: new names go to the end.
_NAMES = """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64
    complex64 complex128 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz
    float8_e4m3fnuz float8_e5m2fnuz float8_e3m4 float8_e4m3 float8_e8m0fnu
    float4_e2m1fn float6_e2m3fn float6_e3m2fn int4 uint4 int2 uint2 int1 uint1
""".split()
_HEAD = struct.Struct("<BB")
_MOST_DIMENSIONS = 64  # of NumPy 2


def _known() -> dict[int, np.dtype]:
    found = {}
    for code, name in enumerate(_NAMES):
        try:
            found[code] = np.dtype(name)
        except TypeError:
            pass  # of a newer ml_dtypes than this one
    return found


_DTYPES = _known()
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_SHAPES = [struct.Struct(f"<BB{rank}Q") for rank in range(_MOST_DIMENSIONS + 1)]


def is_plain(dtype: np.dtype) -> bool:
    """Whether arrays of that dtype travel as raw bytes, so that they need no pickle."""
    return dtype in _CODES


def written(arrays: Iterable[np.ndarray]) -> bytes:
    """Dtypes and shapes of arrays."""
    return b"".join([_one(array.dtype, array.shape) for array in arrays])


def _one(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    code = _CODES.get(dtype)
    if code is None:
        raise TypeError(
            f"An array of dtype {dtype} came, which has no raw form. Numbers and truth "
            "values in the byte order of this machine have one; other objects must be "
            "pickled."
        )
    return _SHAPES[len(shape)].pack(code, len(shape), *shape)


def read(data: bytes, count: int) -> list[tuple[np.dtype, tuple[int, ...], int]]:
    """Dtypes, shapes and numbers of bytes, of as many arrays."""
    found, at = [], 0
    for _ in range(count):
        if len(data) - at < _HEAD.size:
            raise ValueError("descriptions of arrays are cut off")
        code, rank = _HEAD.unpack_from(data, at)
        if code not in _DTYPES or rank > _MOST_DIMENSIONS:
            raise ValueError(f"an array of dtype {code} with {rank} dimensions")
        form = _SHAPES[rank]
        if len(data) - at < form.size:
            raise ValueError("descriptions of arrays are cut off")
        dtype, shape = _DTYPES[code], form.unpack_from(data, at)[2:]
        found.append((dtype, shape, dtype.itemsize * _elements(shape)))
        at += form.size
    if at != len(data):
        raise ValueError("descriptions of arrays are too long")
    return found


def _elements(shape: Sequence[int]) -> int:
    count, not_empty = 1, 1
    for size in shape:
        count *= size
        not_empty *= size or 1
    # NumPy refuses such shapes, also those of arrays without elements.
    if not_empty >= 1 << 60:
        raise ValueError(f"an array of shape {tuple(shape)}")
    return count


class Kind(enum.IntEnum):
    """Kinds below 16 are of each protocol; the others are requests of one."""

    ALIVE = 0  # sent to who waits for an answer
    PATIENCE = 1  # how long the sender waits for an answer, or for a sign of life
    DONE = 2
    FAILED = 3
    PING = 4  # are you there?
    SESSION = 5  # first on streams of a cluster: for which coordinator they are

    CREATE = 16  # requests to parameter servers
    DROP = 17
    READ = 18
    PUSH = 19
    DEFINE = 20
    FENCE = 21
    VERSIONS = 22

    PROGRAM = 32  # requests to workers
    BUILD = 33
    RELEASE = 34
    CALL = 35
    OWN = 36


Fields: TypeAlias = Any
"""A value of JSON, whose reader knows its form."""

HEAD = struct.Struct("<BBHIIIIQ")
"""Mark, kind, 0, arrays; bytes of descriptions, fields, blob and contents."""
_MARK = 0xA7
_SMALL = 1 << 12  # bytes of which a copy is faster than a view
LARGEST_HEAD = 1 << 31
"""Bytes of what comes before the contents."""

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class FrameError(ValueError):
    """What came is no frame, or one that is too large."""


class WireFrame(NamedTuple):
    """A message.

    Attributes:
      kind: what it is about, 0 to 255; `_kinds` lists them.
      fields: what JSON can hold, small.
      blob: bytes; of a stream with keys they are sealed.
      arrays: of dtypes with a raw form.
    """

    kind: int
    fields: Fields = None
    blob: bytes = b""
    arrays: Sequence[np.ndarray] = ()


class Lengths(NamedTuple):
    """The lengths of what follows a head."""

    kind: int
    arrays: int
    types: int
    fields: int
    blob: int
    contents: int

    @property
    def rest(self) -> int:
        """Bytes before the seal."""
        return self.types + self.fields + self.blob


def packed(frame: WireFrame, largest: int) -> tuple[bytes, list[bytes | memoryview]]:
    """What comes before the seal, and the contents of the arrays that have any."""
    arrays = [_native(array) for array in frame.arrays]
    types = written(arrays)
    fields = b"" if frame.fields is None else _written(frame.fields)
    contents = [_raw(array) for array in arrays]
    size = sum(map(len, contents))
    rest = len(types) + len(fields) + len(frame.blob)
    if rest > LARGEST_HEAD or rest + size > largest:
        raise FrameError(
            f"A message of {rest + size} bytes was to be sent; the largest may have "
            f"{min(largest, LARGEST_HEAD)}, or {largest} if most are in arrays. Send "
            "it in parts."
        )
    head = HEAD.pack(
        *(_MARK, frame.kind, 0, len(arrays)),
        *(len(types), len(fields), len(frame.blob), size),
    )
    return b"".join((head, types, fields, frame.blob)), contents


def lengths(head: bytes, largest: int) -> Lengths:
    """The lengths that a head announces."""
    mark, kind, zero, arrays, types, fields, blob, size = HEAD.unpack(head)
    found = Lengths(kind, arrays, types, fields, blob, size)
    if mark != _MARK or zero:
        raise FrameError("what came is no message of this protocol")
    if found.rest > LARGEST_HEAD or found.rest + size > largest:
        raise FrameError(f"a message of {found.rest + size} bytes was announced")
    if 2 * arrays > types:
        raise FrameError(f"a message of {found.rest + size} bytes was announced")
    return found


def unpacked(
    found: Lengths, rest: bytes
) -> tuple[Fields, bytes, list[tuple[np.dtype, tuple[int, ...], int]]]:
    """Fields, blob, and the types of the arrays, of what comes before the seal."""
    middle = found.types + found.fields
    try:
        types = read(rest[: found.types], found.arrays)
        text = rest[found.types : middle].decode()
        fields = json.loads(text) if text else None
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a message contradicts itself: {error}") from error
    if sum([size for *_, size in types]) != found.contents:
        raise FrameError("the arrays of a message have another size than was announced")
    return fields, rest[middle : found.rest], types


def _written(fields: Fields) -> bytes:
    try:
        return _encode(fields).encode()
    except (ValueError, RecursionError) as error:  # such as circles
        raise TypeError(f"{error}, in fields that were to be JSON") from None


def _native(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


def _raw(array: np.ndarray) -> bytes | memoryview:
    if array.nbytes <= _SMALL:
        return array.tobytes()
    # `memoryview(array)` refuses the dtypes of ml_dtypes, so the bytes are shown.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


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
        self._idle_bytes = 0
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        self._returned: deque[np.ndarray] = deque()
        # By identity: a weak reference compares and hashes as what it refers to.
        self._borrowed: dict[int, _BorrowedArray] = {}

    @property
    def idle_bytes(self) -> int:
        """Bytes that nobody uses now."""
        return self._idle_bytes

    def take(self, size: int) -> np.ndarray:
        """A vector of so many bytes, whatever they are."""
        if size < SMALLEST:
            return np.empty(size, np.uint8)
        room = _rounded(size)
        memory = self._found(room)
        if memory is None:
            memory = aligned_empty((room,), np.uint8)
        # NumPy collapses chains of views down to the array whose base is no array.
        array = np.frombuffer(memory.data, np.uint8, size)
        borrowed = _BorrowedArray(array, self._give_back)
        borrowed.memory = memory
        self._borrowed[id(borrowed)] = borrowed
        return array

    def _found(self, room: int) -> np.ndarray | None:
        with self._lock:
            self._sort_returned()
            if memories := self._idle.get(room):
                self._idle_bytes -= room
                self._idle.move_to_end(room)
                return memories.pop()
        return None

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
            self._idle_bytes += memory.nbytes
        while self._idle_bytes > self._most:
            self._forget_one()

    def _forget_one(self) -> None:
        """Free some memory of the size that was not wanted for the longest time."""
        room = next(iter(self._idle))
        if memories := self._idle[room]:
            self._idle_bytes -= memories.pop().nbytes
        else:
            del self._idle[room]


SHARED = ReceiveBuffers()
"""That of all streams of this process."""


def _rounded(size: int) -> int:
    """The next of eight sizes up to the next power of two."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


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
    """Sends and receives frames; any thread may send, one at a time may receive."""

    def __init__(
        self,
        sock: socket.socket,
        keys: Keys | None = None,
        is_trusted: bool = True,
        largest: int = LARGEST,
        buffers: ReceiveBuffers = SHARED,
    ) -> None:
        sock.settimeout(None)
        self.is_trusted = is_trusted
        self._sock = sock
        self._keys = keys
        self._largest = largest
        self._buffers = buffers
        self._sending = threading.Lock()
        self._sent = self._received = 0
        self._ahead = memoryview(bytearray(_AHEAD))
        self._start = self._end = 0
        self._is_closed = False
        self._process = os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def limit_silence(self, seconds: float | None) -> None:
        """Let `send` and `receive` fail when no byte moves for so long."""
        limit_silence(self._sock, seconds)

    def send(self, frame: WireFrame) -> None:
        """Send a frame; its arrays must not change meanwhile."""
        head, contents = packed(frame, self._largest)
        with self._sending:
            self._write([self._sealed(head), *contents])

    def send_if_idle(self, frame: WireFrame) -> None:
        """Send a small frame, or nothing if this would have to wait."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            head, _ = packed(frame, self._largest)
            self._write_at_once(self._sealed(head))
        finally:
            self._sending.release()

    def receive(self) -> WireFrame:
        """The next frame."""
        if self._start == self._end:
            self._start = 0
            self._end = self._read(self._ahead, is_between=True)
        head = self._bytes(HEAD.size)
        found = lengths(head, self._largest)
        try:
            rest = self._opened(head, found)
            fields, blob, types = unpacked(found, rest)
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


PATIENCE = 10.0
"""Seconds in which the other process must take what goes through a door."""

_STREAM, _DOOR = b"s", b"d"
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux


@final
class Door:
    """The end of those who ask; threads may share it."""

    def __init__(self, sock: socket.socket, largest: int = LARGEST) -> None:
        # A process that is stopped takes some hundreds, and then none.
        limit_silence(sock, PATIENCE)
        self._sock = sock
        self._largest = largest
        self._lock = threading.Lock()

    def dial(self) -> Stream:
        """A new stream to the other process."""
        return Stream(self._sent(_STREAM), largest=self._largest)

    def another(self) -> socket.socket:
        """The socket of a new door to the other process, for a third one."""
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
    """Give each stream that is opened to a function, until the other end closes."""
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
