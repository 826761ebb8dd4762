"""Frames arrive as they were sent, and nothing else is taken for one."""

import random
import socket
import struct
import threading

import ml_dtypes
import numpy as np
import pytest

from jaxstrategy.parameter_servers.wire import _frame, _stream, _wire_types
from jaxstrategy.parameter_servers.wire._frame import FrameError, WireFrame
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._stream import Keys, Stream

KEYS = Keys(b"1" * 32, b"2" * 32), Keys(b"2" * 32, b"1" * 32)
DTYPES = [
    *"bool int8 int16 int32 int64 uint8 uint16 uint32 uint64".split(),
    *"float16 float32 float64 complex64 complex128".split(),
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e8m0fnu,
    ml_dtypes.float4_e2m1fn,
    ml_dtypes.int4,
    ml_dtypes.uint4,
    ml_dtypes.int2,
]


def connected(keys=(None, None), **options):
    ends = socket.socketpair()
    return [Stream(s, k, **options) for s, k in zip(ends, keys, strict=True)]


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def ends(request):
    here, there = connected(KEYS if request.param else (None, None))
    yield here, there
    here.close()
    there.close()


def sent(ends, frame):
    """What arrives; sent in another thread, since sockets hold only so much."""
    sender = threading.Thread(target=ends[0].send, args=(frame,))
    sender.start()
    found = ends[1].receive()
    sender.join()
    return found


def assert_same(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_arrives(ends, kind):
    found = sent(ends, WireFrame(kind, [1, "x", None, 2.5], b"\0blob", (np.ones(3),)))
    assert found.kind == kind
    assert (found.fields, found.blob) == ([1, "x", None, 2.5], b"\0blob")
    assert_same(found.arrays[0], np.ones(3))


def test_an_empty_frame_arrives(ends):
    assert sent(ends, WireFrame(200)) == WireFrame(200, None, b"", [])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (40_000,), (1,) * 30])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_arrays_of_all_types_arrive(ends, dtype, shape):
    count = int(np.prod(shape))
    bits = np.dtype(dtype).itemsize * 8 if np.dtype(dtype).kind != "V" else 4
    array = (np.arange(count) % 2).astype(dtype).reshape(shape)
    assert bits  # of any width
    found = sent(ends, WireFrame(1, arrays=(array,)))
    assert_same(found.arrays[0], array)


def test_every_bit_of_an_array_arrives(ends):
    bits = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    for dtype in ("float32", ml_dtypes.bfloat16, "complex128"):
        array = bits.view(dtype).reshape(2, -1)
        assert_same(sent(ends, WireFrame(1, arrays=(array,))).arrays[0], array)


def test_arrays_in_any_order_of_bytes_and_elements_arrive(ends):
    whole = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    wide = np.arange(90_000.0).reshape(300, 300)
    given = [whole.T, whole[::2, 1:], whole[:, ::-1], wide.T, wide[:, :7]]
    given += [whole.astype(">f4"), np.broadcast_to(np.float32(3), (2, 5))]
    found = sent(ends, WireFrame(1, arrays=given)).arrays
    for each, expected in zip(found, given, strict=True):
        assert each.dtype.isnative
        np.testing.assert_array_equal(each, expected)


def test_more_arrays_than_one_system_call_takes_arrive(ends):
    given = [np.full(k % 50, k, np.int32) for k in range(3000)]
    found = sent(ends, WireFrame(1, arrays=given)).arrays
    assert len(found) == 3000
    assert all(map(np.array_equal, found, given))


def test_frames_of_all_sizes_arrive_in_order(ends):
    frames = []
    for size in (0, 1, 65_000, 65_536, 70_000, 3, 200_000, 1 << 20, 5, 131_072):
        array = np.arange(size, dtype=np.uint8)
        frames.append(WireFrame(1, [size], bytes(size // 3), (array, array[:7])))
    sender = threading.Thread(target=lambda: [ends[0].send(each) for each in frames])
    sender.start()
    for expected in frames:
        found = ends[1].receive()
        assert (found.fields, found.blob) == (expected.fields, expected.blob)
        assert all(map(np.array_equal, found.arrays, expected.arrays))
    sender.join()


def test_threads_send_whole_frames(ends):
    def send(own):
        for turn in range(40):
            ends[0].send(WireFrame(1, [own, turn], arrays=(np.full(9000, own),)))

    threads = [threading.Thread(target=send, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    turns = {k: [] for k in range(4)}
    for _ in range(160):
        found = ends[1].receive()
        own, turn = found.fields
        assert (found.arrays[0] == own).all()
        turns[own].append(turn)
    assert all(each == list(range(40)) for each in turns.values())
    for thread in threads:
        thread.join()


def test_the_end_between_frames_is_the_end_of_the_stream(ends):
    ends[0].send(WireFrame(1))
    ends[0].close()
    assert ends[1].receive().kind == 1
    with pytest.raises(EOFError):
        ends[1].receive()


@pytest.mark.parametrize("part", [0.01, 0.3, 0.9, 0.9999])
def test_a_frame_that_is_cut_off_is_an_error(part):
    left, right = socket.socketpair()
    head, contents = _frame.packed(
        WireFrame(1, [1] * 9, b"x" * 99, (np.ones(50_000),)), 1 << 30
    )
    data = head + b"".join(contents)
    there = Stream(right)
    cut = data[: max(1, int(len(data) * part))]
    sender = threading.Thread(target=lambda: (left.sendall(cut), left.close()))
    sender.start()
    with pytest.raises(ConnectionResetError, match="ended within a message"):
        there.receive()
    sender.join()
    there.close()


def test_a_frame_in_single_bytes_arrives():
    left, right = socket.socketpair()
    frame = WireFrame(5, {"a": 1}, b"xyz", (np.arange(20, dtype=np.int16),))
    head, contents = _frame.packed(frame, 1 << 20)
    there = Stream(right)

    def trickle():
        for byte in head + b"".join(contents):
            left.send(bytes([byte]))

    sender = threading.Thread(target=trickle)
    sender.start()
    found = there.receive()
    sender.join()
    assert (found.kind, found.fields, found.blob) == (5, {"a": 1}, b"xyz")
    assert_same(found.arrays[0], frame.arrays[0])
    left.close()
    there.close()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (WireFrame(1, arrays=(np.array(["a"]),)), "array of dtype <U1 came"),
        (WireFrame(1, arrays=(np.array([{}]),)), "array of dtype object came"),
        (WireFrame(1, {1, 2}), "not JSON serializable"),
    ],
)
def test_what_has_no_raw_form_is_refused_and_nothing_sent(ends, frame, message):
    with pytest.raises(TypeError, match=message):
        ends[0].send(frame)
    assert sent(ends, WireFrame(9)).kind == 9


def test_a_frame_over_the_limit_is_refused_by_its_sender():
    here, there = connected(largest=10_000)
    with pytest.raises(FrameError, match=r"20...? bytes was to be sent; .* 10000"):
        here.send(WireFrame(1, arrays=(np.zeros(2500),)))
    assert sent((here, there), WireFrame(9)).kind == 9
    here.close()
    there.close()


def test_a_frame_over_the_limit_is_refused_by_its_receiver():
    left, right = socket.socketpair()
    here, there = Stream(left), Stream(right, largest=10_000)
    here.send(WireFrame(1, arrays=(np.zeros(2500),)))
    with pytest.raises(FrameError, match="of 200.. bytes was announced"):
        there.receive()
    here.close()
    there.close()


def head(mark=0xA7, kind=1, zero=0, arrays=0, types=0, fields=0, blob=0, contents=0):
    return _frame.HEAD.pack(mark, kind, zero, arrays, types, fields, blob, contents)


def array_type(code, *shape, rank=None):
    rank = len(shape) if rank is None else rank
    return struct.pack(f"<BB{len(shape)}Q", code, rank, *shape)


HUGE = (1 << 64) - 1
FLOAT32 = 10
HOSTILE = {
    "another protocol": (
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
        "no message of this",
    ),
    "pickle": (b"\x80\x04cos\nsystem\n(S'true'\ntR." * 2, "no message of this"),
    "zeros": (bytes(64), "no message of this"),
    "flags": (head(zero=3), "no message of this"),
    "huge contents": (head(contents=HUGE), "was announced"),
    "huge fields": (head(fields=(1 << 32) - 1), "was announced"),
    "huge blob": (head(blob=(1 << 32) - 1), "was announced"),
    "arrays without types": (head(arrays=(1 << 32) - 1), "was announced"),
    "negative size": (
        head(arrays=1, types=10, contents=4) + array_type(FLOAT32, HUGE),
        "contradicts itself: an array of shape",
    ),
    "overflowing shape": (
        head(arrays=1, types=26) + array_type(FLOAT32, 1 << 33, 1 << 33, 1 << 62),
        "contradicts itself: an array of shape",
    ),
    "huge shape without elements": (
        head(arrays=1, types=18) + array_type(FLOAT32, 0, 1 << 62),
        "contradicts itself: an array of shape",
    ),
    "other sizes than announced": (
        head(arrays=1, types=10, contents=400) + array_type(FLOAT32, 1 << 31),
        "another size than was announced",
    ),
    "too many dimensions": (
        head(arrays=1, types=2 + 8 * 65) + array_type(FLOAT32, *([1] * 65)),
        "with 65 dimensions",
    ),
    "unknown dtype": (
        head(arrays=1, types=10) + array_type(99, 0),
        "an array of dtype 99",
    ),
    "types cut off": (
        head(arrays=2, types=10) + array_type(FLOAT32, 0),
        "are cut off",
    ),
    "dimensions cut off": (
        head(arrays=1, types=10) + array_type(FLOAT32, 0, rank=3),
        "are cut off",
    ),
    "types left over": (
        head(arrays=1, types=20) + array_type(FLOAT32, 0) * 2,
        "are too long",
    ),
    "no JSON": (head(fields=4) + b"[1,}", "contradicts itself"),
    "no text": (head(fields=4) + b"\xff\xfe\xfd[", "contradicts itself"),
    "deep JSON": (head(fields=200_000) + b"[" * 200_000, "contradicts itself"),
    "long number": (head(fields=9000) + b"9" * 9000, "contradicts itself"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_head_is_an_error_and_takes_no_memory(name):
    data, message = HOSTILE[name]
    left, right = socket.socketpair()
    there = Stream(right)
    taken = []
    there._buffers = type("None", (), {"take": lambda _, size: taken.append(size)})()
    sender = threading.Thread(target=lambda: (left.sendall(data), left.close()))
    sender.start()
    with pytest.raises(FrameError, match=message):
        there.receive()
    assert not taken
    sender.join()
    there.close()


@pytest.mark.parametrize("keys", [(None, None), KEYS], ids=["plain", "sealed"])
@pytest.mark.parametrize("seed", range(6))
def test_changed_bytes_never_do_worse_than_an_error(keys, seed):
    """Random changes of good frames: an error, the end, or a frame; never a crash."""
    random_ = random.Random(seed)
    out = _frame.packed(
        WireFrame(1, {"a": [1, 2]}, b"blob", (np.arange(5), np.ones((2, 3), bool))),
        1 << 20,
    )
    for _ in range(60):
        left, right = socket.socketpair()
        here, there = Stream(left, keys[0]), Stream(right, keys[1], largest=1 << 20)
        data = bytearray(here._sealed(out[0]) + b"".join(out[1]))
        for _ in range(random_.randint(1, 4)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        left.sendall(data)
        here.close()
        try:
            for _ in range(5):
                there.receive()
        except (EOFError, FrameError, ConnectionResetError):
            pass
        there.close()


@pytest.mark.parametrize("at", [1, 30, 45, 60, 70])
def test_a_sealed_frame_with_a_changed_bit_is_refused(at):
    """Heads, types, fields and blobs are sealed; contents of arrays are not."""
    left, right = socket.socketpair()
    here, there = Stream(left, KEYS[0]), Stream(right, KEYS[1])
    head_, contents = _frame.packed(
        WireFrame(1, [1, 2, 3], b"b" * 24, (np.zeros(2),)), 1 << 20
    )
    data = bytearray(here._sealed(head_) + b"".join(contents))
    assert len(head_) == 28 + 10 + 7 + 24
    data[at] ^= 1
    left.sendall(data)
    here.close()
    with pytest.raises((FrameError, ConnectionResetError)):
        there.receive()
    there.close()


def test_frames_with_seals_cannot_be_replayed_reordered_or_reflected():
    def recorded(*frames):
        left, right = socket.socketpair()
        sender = Stream(left, KEYS[0])
        for each in frames:
            sender.send(each)
        sender.close()
        with right:
            return right.recv(1 << 16)

    one = recorded(WireFrame(1))
    both = recorded(WireFrame(1), WireFrame(2))
    second = both[len(one) :]
    for data, kinds, keys in (
        (both, [1, 2], KEYS[1]),
        (one + one, [1], KEYS[1]),  # replayed
        (second + one, [], KEYS[1]),  # reordered
        (one, [], KEYS[0]),  # sent back to who made it
        (one, [], Keys(b"3" * 32, b"4" * 32)),  # taken to another connection
    ):
        left, right = socket.socketpair()
        there = Stream(right, keys)
        left.sendall(data)
        left.close()
        assert [there.receive().kind for _ in kinds] == kinds
        end = pytest.raises((FrameError, EOFError))
        with end:
            there.receive()
        assert isinstance(end.excinfo.value, EOFError) == (kinds == [1, 2])
        there.close()


def test_codes_of_dtypes_stay_what_they_are():
    """Processes with other versions of this file exchange them."""
    names = "bool int8 float32 complex128 bfloat16 float8_e5m2 int4".split()
    found = [_wire_types.written([np.zeros((), name)])[0] for name in names]
    assert found == [0, 1, 10, 13, 14, 16, 26]


def test_closing_wakes_who_waits_and_can_be_repeated(ends):
    caught = []

    def wait():
        with pytest.raises((EOFError, OSError)) as error:
            ends[1].receive()
        caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    ends[1].close()
    thread.join(60)
    assert caught and ends[1].is_closed
    ends[1].close()
    with pytest.raises(OSError):
        ends[1].send(WireFrame(1))


def test_an_array_may_be_as_long_lived_as_its_reader_likes():
    here, there = _stream.pair()
    kept = []
    for turn in range(20):
        kept += sent(
            (here, there), WireFrame(1, arrays=(np.full(20_000, turn),))
        ).arrays
    for turn, each in enumerate(kept):
        assert (each == turn).all()
    here.close()
    there.close()
