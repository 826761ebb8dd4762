"""What workers, servers and strangers say to each other over connections."""

import contextlib
import dataclasses
import gc
import os
import pickle
import random
import socket
import stat
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.sockets import Proxy, called, free_address

import jaxstrategy as js
from jaxstrategy._src.parameter_servers import stream
from jaxstrategy._src.parameter_servers.stream import (
    SMALLEST,
    FrameError,
    ReceiveBuffers,
    Stream,
)

SECRET = "a secret of the tests"
KEYS = stream.Keys(b"1" * 32, b"2" * 32), stream.Keys(b"2" * 32, b"1" * 32)


# Strangers, at the address of a parameter server of this process.


def strategy_at(*addresses):
    *workers, server = addresses
    spec = js.cluster_resolver.ClusterSpec({"worker": workers, "ps": [server]})
    resolver = js.cluster_resolver.SimpleClusterResolver(spec, task_type="chief")
    return js.ParameterServerStrategy(resolver)


@pytest.fixture(scope="module")
def job():
    """Addresses of a worker and a server, with a proxy before it; a strategy."""
    addresses = free_address(), free_address()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSTRATEGY_CLUSTER_SECRET", SECRET)
        cluster = {"worker": [addresses[0]], "ps": [addresses[1]]}
        for job in ("worker", "ps"):
            js.Server(cluster, job, 0)
        proxy = Proxy(addresses[1])
        strategy = strategy_at(addresses[0], proxy.address)
        with strategy.scope():
            variable = js.Variable(jnp.zeros(3))
        yield addresses, proxy, strategy, variable
        strategy.close()
        proxy.close()


GREETING = f"jaxstrategy-frames/7 {sys.byteorder} {stream.CONTENTS_SEAL}\n".encode()
GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "a message without handshake": stream.packed(["x"]).start,
    "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "greeting and zeros": GREETING + bytes(232),
    "greeting and a wrong proof": GREETING + bytes(32) + b"\xff" * 32,
    "greeting and half a proof": GREETING + bytes(32) + b"\xff" * 16,
    "greeting and a message": GREETING + bytes(32) + stream.packed(["x"]).start,
    "half a greeting": GREETING[:5],
}


def test_strangers_are_hung_up_on_and_nobody_waits_for_them(job, monkeypatch):
    addresses, _, _, variable = job
    unpickled = []
    monkeypatch.setattr("pickle.loads", unpickled.append)
    slow = [called(address) for address in addresses for _ in range(70)]
    chance = random.Random(0)
    for address in addresses:
        for number, data in enumerate([*GARBAGE.values(), *[None] * 20]):
            with called(address) as sock, contextlib.suppress(OSError):
                begin = GREETING if chance.random() < 0.5 else b""
                more = begin + chance.randbytes(chance.randrange(4000))
                sock.sendall(more if data is None else data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
                assert number >= 0
    assert not unpickled
    monkeypatch.undo()
    variable.assign_add(jnp.ones(3))
    for sock in slow:
        sock.close()
    variable.assign_sub(jnp.ones(3))
    assert variable.numpy().tolist() == [0, 0, 0]


def test_strangers_for_whom_there_was_no_thread_do_not_count(job, monkeypatch):
    address, *_ = job[0]
    with monkeypatch.context() as patch:
        patch.setattr(stream, "started", lambda thread: False)
        for _ in range(3):
            with called(address) as sock, contextlib.suppress(OSError):
                assert sock.recv(1) == b""
    slow = [called(address) for _ in range(70)]
    slow[0].settimeout(5)  # half of what a handshake may take
    assert slow[0].recv(1) == b""
    for sock in slow:
        sock.close()


def test_a_recorded_connection_cannot_be_played_again_and_tells_no_secret(job):
    addresses, proxy, _, variable = job
    variable.assign(jnp.zeros(3))
    variable.assign_add(jnp.ones(3))
    assert SECRET.encode() not in b"".join(proxy.said)
    for said in proxy.said:
        with called(addresses[1]) as again, contextlib.suppress(OSError):
            again.sendall(said)
            while again.recv(1 << 16):
                pass  # until it is hung up on
    assert variable.numpy().tolist() == [1, 1, 1]


def test_who_has_another_secret_or_none_is_refused_and_one_address_is_bound(
    job, monkeypatch
):
    addresses, *_, variable = job
    monkeypatch.setenv("JAXSTRATEGY_CLUSTER_SECRET", "another secret, not it")
    with pytest.raises(js.ClusterError, match="has another JAXSTRATEGY_CLUSTER_SECRET"):
        strategy_at(*addresses)
    another = free_address()
    js.Server({"worker": [another], "ps": [addresses[1]]}, "worker", 0)
    monkeypatch.setenv("JAXSTRATEGY_CLUSTER_SECRET", SECRET)
    with pytest.raises(js.ClusterError, match=f"at {another} has another JAXSTRATEGY"):
        strategy_at(addresses[0], another, addresses[1])
    monkeypatch.delenv("JAXSTRATEGY_CLUSTER_SECRET")
    with pytest.raises(js.ClusterError, match="the job needs a secret"):
        strategy_at(*addresses)
    server = js.Server(
        {"worker": ["a:1"], "ps": [free_address()]}, "ps", 0, start=False
    )
    with pytest.raises(js.ClusterError, match="the job needs a secret"):
        server.start()
    assert variable.numpy().shape == (3,)
    monkeypatch.setenv("JAXSTRATEGY_CLUSTER_SECRET", SECRET)
    for every in ("0.0.0.0:2222", "[::]:2222"):
        server = js.Server({"worker": ["a:1"], "ps": [every]}, "ps", 0, start=False)
        with pytest.raises(js.ClusterError, match="every address of this host"):
            server.start()


def test_what_broke_a_connection_is_asked_again_unless_it_would_count_twice(job):
    """The proxy breaks each connection at its next request."""
    _, proxy, _, variable = job

    def broken(data, is_to_target):
        proxy.change = lambda data, is_to_target: data
        raise OSError

    proxy.change = broken
    variable.assign(jnp.full(3, 5.0))
    proxy.change = broken
    assert variable.numpy().tolist() == [5, 5, 5]
    proxy.change = broken
    with pytest.raises(
        js.errors.ParameterServerLost, match="being made counts is not known"
    ):
        variable.assign_add(jnp.ones(3))
    assert variable.numpy().tolist() == [5, 5, 5]


@pytest.fixture(scope="module")
def worker():
    backend = js.coordinator.LocalProcesses(1, 1)
    yield backend.start(0, 0)
    backend.close()


class Odd(Exception):
    """Its arguments are others than those that it is made of."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


@dataclasses.dataclass
class Record(Exception):
    first: int
    second: str


class WithLock(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


def raising(make):
    def build(index):
        raise make()

    return build


def test_exceptions_are_the_same_here(worker):
    for make in (
        lambda: KeyError("x"),
        lambda: Odd(code=5),
        lambda: Record(1, "two"),
        lambda: UnicodeDecodeError("utf8", b"x", 0, 1, "bad"),
        lambda: OSError(2, "No such file", "data"),
        lambda: js.OutOfRangeError("no more"),
        lambda: js.errors.ClosureInputError(ValueError("inner")),
        lambda: jax.errors.JaxRuntimeError("INTERNAL: of XLA"),
        lambda: ExceptionGroup("two", [ValueError(1), KeyError(2)]),
    ):
        expected = make()
        with pytest.raises(type(expected)) as caught:
            worker.build(1, raising(make))
        found = caught.value
        assert type(found) is type(expected) and str(found) == str(expected)
        assert repr(found.args) == repr(expected.args)
        assert getattr(found, "code", None) == getattr(expected, "code", None)
    with pytest.raises(RuntimeError, match="WithLock: it broke") as caught:
        worker.build(1, raising(lambda: WithLock("it broke")))
    assert "in build" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        worker.build(1, raising(lambda: SystemExit(3)))

    def with_cause(index):
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError("the effect") from error

    with pytest.raises(ValueError, match="the effect") as caught:
        worker.build(1, with_cause)
    assert "the cause" in caught.value.__notes__[0]
    assert "Traceback of Worker 0" in caught.value.__notes__[0]


def test_resources_are_built_there_of_each_other(worker, monkeypatch):
    large = np.arange(100_000)  # a part of the function, which it refers to
    worker.build(1, lambda index: [large, os.getpid()])
    worker.build(2, lambda index, first: np.array([len(first[0]), first[1]]), [1])
    count, pid = worker.own(2)
    assert count == 100_000 and pid != os.getpid()
    worker.release([1, 5])
    with pytest.raises(KeyError):
        worker.build(3, lambda index, first: 0, [1])
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        worker.build(3, lambda index: lock)
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    with pytest.raises(
        js.errors.MissingExtraError, match=r"jaxstrategy\[coordinator\]"
    ):
        worker.build(3, lambda index: 1)
    monkeypatch.undo()
    assert worker.own(2)[0] == 100_000


def test_a_fork_does_not_ask_on_its_parents_connections(worker, monkeypatch):
    worker.build(4, lambda index: np.ones(1))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(js.WorkerLost, match="this one is a fork"):
        worker.own(4)
    monkeypatch.undo()
    assert worker.own(4) == 1


@contextlib.contextmanager
def connected(keys=(None, None), **options):
    ends = socket.socketpair()
    made = [Stream(s, k, **options) for s, k in zip(ends, keys, strict=True)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def sent(ends, value):
    """What arrives; sent in another thread, since sockets hold only so much."""
    sender = threading.Thread(target=ends[0].send, args=(value,))
    sender.start()
    found = ends[1].receive()
    sender.join()
    return found


@pytest.mark.parametrize("keys", [(None, None), KEYS], ids=["plain", "sealed"])
def test_messages_arrive_as_they_were_sent(keys):
    wide = np.arange(90_000.0).reshape(300, 300)
    arrays = [wide.T, wide[:, :7], wide[::2, ::-1], wide[:2].astype(">f4")]
    arrays += [np.full(k % 50, k, np.int32) for k in range(2000)]
    for dtype in (bool, np.float16, ml_dtypes.bfloat16, ml_dtypes.int4, np.complex128):
        for shape in ((), (0,), (3, 0, 2), (40_000,), (1,) * 30):
            arrays.append(np.ones(shape).astype(dtype))
    arrays += [np.array(["a"]), np.array([None, 3])]
    fields = [1, "x", None, {"a": 2.5}]
    with connected(keys) as ends:
        for message in (
            ("versions", [1]),
            ("call", fields, bytes(100_000), arrays),
            *[("set", [n], b"x" * n, []) for n in (65_000, 65_536, 70_000, 3)],
        ):
            found = sent(ends, message)
            assert found[:3] == message[:3]
            for each, expected in zip(found[3:], message[3:], strict=True):
                for one, other in zip(each, expected, strict=True):
                    assert one.dtype.isnative and one.shape == other.shape
                    assert one.tolist() == other.tolist()
        with pytest.raises(TypeError, match="cannot pickle"):
            ends[0].send(threading.Lock())  # and nothing is sent
        ends[0].send("last")
        ends[0].close()
        assert ends[1].receive() == "last"
        with pytest.raises(EOFError, match="the connection was closed"):
            ends[1].receive()


def test_messages_that_are_too_large_are_refused():
    large = np.zeros(2500)
    with connected(largest=10_000) as ends:
        with pytest.raises(FrameError, match="bytes was to be sent; .* 10000"):
            ends[0].send(large)
        ends[0]._largest = 1 << 30
        ends[0].send(large)
        with pytest.raises(FrameError, match="of 20... bytes in 1 arrays was"):
            ends[1].receive()
    with connected() as (here, there):
        here._sock.sendall(array_of((1 << 37,), 1 << 37, "int8"))

        def take(size):
            raise MemoryError

        there._buffers = type("N", (), {"take": staticmethod(take)})()
        with pytest.raises(FrameError, match="is larger than the memory"):
            there.receive()


HUGE = (1 << 64) - 1


def head(mark=stream._MARK, pickled=0, count=0, contents=0):
    return stream._HEAD.pack(mark, pickled, count, contents)


def array_of(shape, size, name="float32", announced=None):
    """A message with an array of that shape, and as many bytes as it says."""

    class Lying:
        def __reduce__(self):
            return stream._array, (name, shape, pickle.PickleBuffer(bytearray(4)))

    pickled = pickle.dumps([Lying()], 5, buffer_callback=lambda buffer: None)
    announced = size if announced is None else announced
    return head(stream._MARK, len(pickled), 1, announced) + (
        size.to_bytes(8, "little") + pickled
    )


HOSTILE = [
    (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", "no message of this"),
    (b"\x80\x04cos\nsystem\n(S'true'\ntR." * 2, "no message of this"),
    (head(contents=HUGE), "was announced"),
    (head(count=(1 << 32) - 1), "was announced"),
    (head(pickled=(1 << 32) - 1), "was announced"),
    (array_of((1,), HUGE, announced=4), "another size than announced"),
    (array_of((1,), 4, announced=8), "another size than announced"),
    (array_of((HUGE,), 4) + bytes(4), "cannot be read"),
    (array_of((1 << 33, 1 << 33, 1 << 62), 0), "cannot be read"),
    (array_of((0, 1 << 62, 1 << 62), 0), "cannot be read"),
    (array_of((1,) * 65, 4) + bytes(4), "cannot be read"),
    (array_of((1,), 4, "float31") + bytes(4), "cannot be read"),
    (array_of((1,), 4, "O") + bytes(4), "cannot be read"),
    (head(pickled=4) + b"[1,}", "cannot be read"),
    (head(pickled=200_000) + b"(" * 200_000, "cannot be read"),
]


def test_a_hostile_head_is_an_error_and_takes_no_memory():
    for data, message in HOSTILE:
        with connected() as (here, there):
            taken = []

            def take(size, taken=taken):
                taken.append(size)
                return np.empty(size, np.uint8)

            there._buffers = type("N", (), {"take": staticmethod(take)})()
            sender = threading.Thread(target=here._sock.sendall, args=(data,))
            sender.start()
            with pytest.raises(FrameError, match=message):
                there.receive()
            assert sum(taken) <= 4
            there.close()
            here.close()
            sender.join()


def test_changed_and_cut_off_messages_never_do_worse_than_an_error():
    """Of streams with keys: within a host the kernel changes nothing."""
    chance = random.Random(1)
    value = [{"a": [1, 2]}, b"blob", np.arange(5), np.ones((90, 70)), np.arange(9000)]
    out = stream.packed(value, 1 << 20)
    for turn in range(200):
        with connected(KEYS, largest=1 << 20) as (here, there):
            parts = here._sealed(out)
            data = bytearray(b"".join(parts))
            if turn < 150:
                at = chance.randrange(len(parts[0]) if turn % 2 else len(data))
                data[at] ^= 1 << chance.randrange(8)
            else:
                del data[chance.randrange(1, len(data)) :]

            def send(here=here, data=data):
                with contextlib.suppress(OSError):
                    here._sock.sendall(data)
                here.close()

            sender = threading.Thread(target=send)
            sender.start()
            with pytest.raises((EOFError, FrameError, ConnectionResetError)):
                there.receive()
            there.close()
            sender.join()


def test_without_cryptography_contents_are_sealed_all_the_same(monkeypatch):
    monkeypatch.setattr(stream, "_has_gmac", False)
    for change in (0, 1):
        with connected(KEYS) as (here, there):
            start, contents, seal = here._sealed(stream.packed(np.arange(1000)))
            assert len(seal) == 32
            here._sock.sendall(start + bytes([change]) + contents[1:] + seal)
            wrong = pytest.raises(FrameError) if change else contextlib.nullcontext()
            with wrong:
                assert there.receive().tolist() == list(range(1000))


def test_messages_with_seals_cannot_be_replayed_reordered_or_reflected():
    def recorded(*values):
        left, right = socket.socketpair()
        with right:
            sender = Stream(left, KEYS[0])
            for each in values:
                sender.send(each)
            sender.close()
            return right.recv(1 << 16)

    one = recorded(1)
    both = recorded(1, 2)
    other = stream.Keys(b"3" * 32, b"4" * 32)
    for data, values, keys in (
        (both, [1, 2], KEYS[1]),
        (one + one, [1], KEYS[1]),  # replayed
        (both[len(one) :] + one, [], KEYS[1]),  # reordered
        (one, [], KEYS[0]),  # sent back to who made it
        (one, [], other),  # taken to another connection
    ):
        with connected((None, keys)) as (left, there):
            left._sock.sendall(data)
            left.close()
            assert [there.receive() for _ in values] == values
            with pytest.raises(EOFError if values == [1, 2] else FrameError):
                there.receive()


def test_only_the_methods_of_servers_and_workers_are_requests(worker):
    for method in ("kill", "close", "__class__", "nothing"):
        told = f"A WorkerEngine was sent a request {method}"
        with pytest.raises(ValueError, match=told):
            worker.ask(method)


# Memory of arrays that were received is used again, and never while anybody has it.


SIZE = 4 * SMALLEST
VIEWS = {
    "part": lambda a: a[5:9],
    "bfloat16": lambda a: a.view(ml_dtypes.bfloat16)[1:],
    "part of a part": lambda a: a.view(np.int64)[10:][2:5].reshape(3, 1),
    "memoryview": lambda a: memoryview(a)[3:],
    "frombuffer": lambda a: np.frombuffer(a, np.int16)[7:],
    "dlpack": lambda a: np.from_dlpack(a[2:]),
    "jax": lambda a: jax.device_put(a.view(np.float32), jax.devices("cpu")[0]),
    "jax of a part": lambda a: jnp.asarray(a[64:].view(np.float32)),
}


def place(array):
    return array.__array_interface__["data"][0]


def test_memory_stays_while_anything_made_of_the_array_lives():
    for name, view_of in VIEWS.items():
        buffers = ReceiveBuffers()
        array = buffers.take(SIZE)
        array[:] = 7
        gone, where = weakref.ref(array), place(array)
        view = jax.block_until_ready(view_of(array))
        del array
        gc.collect()
        others = [buffers.take(SIZE) for _ in range(3)]
        is_lent = gone() is not None
        assert is_lent == (where not in map(place, others)), name
        for each in others:
            each[:] = 9
        assert set(np.asarray(view).tobytes()) == {7}, name
        del view, others, each
        gc.collect()
        assert gone() is None
        assert where in [place(each) for each in [buffers.take(SIZE) for _ in "1234"]]


def test_memory_is_not_used_again_while_a_program_reads_or_holds_it():
    def late(x):
        """Reads its argument when other work is done."""
        matrix = jnp.eye(200) / 2
        matrix = jax.lax.fori_loop(0, 50, lambda _, m: jnp.sin(m @ m), matrix)
        return x + jnp.minimum(matrix[0, 0], 0) * 0

    buffers = ReceiveBuffers()
    for function in (late, lambda x: x):
        for donated in ((), (0,)):
            jitted = jax.jit(function, donate_argnums=donated)
            for put in (lambda x: x, jax.device_put, jnp.asarray):
                array = buffers.take(SIZE).view(np.float32)
                array[:] = 7
                found = jitted(put(array))
                del array
                for _ in range(3):
                    buffers.take(SIZE)[:] = 255  # whatever is given, it is written
                np.testing.assert_array_equal(found, np.full(SIZE // 4, 7, np.float32))


def test_only_so_much_idle_memory_is_kept_and_similar_sizes_share_it():
    buffers = ReceiveBuffers(most=3 * SIZE)
    where = place(buffers.take(SIZE - 3))
    assert buffers.idle_bytes == SIZE and place(buffers.take(SIZE)) == where
    held = [buffers.take(SIZE) for _ in range(5)] + [buffers.take(2 * SIZE)]
    del held
    gc.collect()
    assert buffers.idle_bytes <= 3 * SIZE
    assert len({place(each) for each in [buffers.take(SIZE) for _ in "123"]}) == 3
    for size in (0, 1, SMALLEST - 1, SMALLEST, 1_000_003):
        array = buffers.take(size)
        array[:] = 3
        assert array.shape == (size,) and array.dtype == np.uint8


def test_sockets_of_children_lie_in_a_folder_of_the_user_which_goes_with_them():
    backend = js.coordinator.LocalProcesses(1, 1)
    address = backend._servers[0].address
    folder = os.path.dirname(address)
    assert backend.servers[0].versions([]) == []
    assert stat.S_ISSOCK(os.stat(address).st_mode)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    backend.close()
    assert not os.path.exists(folder)
