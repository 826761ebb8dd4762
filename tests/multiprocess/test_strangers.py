"""Whatever is sent ends one connection, and never process 0 or the job."""

import contextlib
import json
import pathlib
import resource
import socket
import textwrap

import hypothesis.strategies as st
import peer
import pytest
from harness import STATUS, VERSIONS, meets, until
from hypothesis import HealthCheck, given, settings

import jaxstrategy
from jaxstrategy import ClusterError
from jaxstrategy.processes import _rendezvous

HELLO = {"index": 1, "count": 2, "host": "h", "pid": 7, "versions": VERSIONS}
BOUNDED = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# Hellos

NO_HELLOS = [
    b"",
    b"[" * 60_000,
    b'{"index": 1, "count": 2, "host": ' + b"[" * 500 + b"]" * 500 + b"}",
    b"\xff\xfe" + json.dumps(HELLO).encode("utf-16-le"),
    b'{"index": 1',
    b"1" * 5000,
    [1],
    None,
    {"index": 1},
    HELLO | {"index": "1"},
    HELLO | {"index": True},
    HELLO | {"index": -1},
    HELLO | {"index": 10**400},
    HELLO | {"count": None},
    HELLO | {"versions": 5},
    HELLO | {"versions": {"jax": {}}},
    HELLO | {"host": "h" * 2000},
    HELLO | {"pid": "7"},
    HELLO | {"job": {}},
]


def test_a_hello_that_is_none_is_dropped_alone(address, attend, pool):
    zero = pool.submit(attend, 0)
    for hello in NO_HELLOS:
        with peer.guest(address, hello).sock as stranger:
            assert peer.read(stranger, 1000) == b"", hello
    for length in (65537, (1 << 32) - 1):  # more is not even waited for
        with peer.call(address) as sock:
            peer.Peer(sock).greet().hear()
            sock.sendall(length.to_bytes(4, "big"))
            assert peer.read(sock, 1000, 5) == b"", length
    assert meets(zero, attend)


def test_who_says_hello_twice_is_dropped(address, attend, pool):
    zero = pool.submit(attend, 0, 3, seconds=2)
    caller = peer.guest(address, HELLO | {"count": 3})
    assert "seconds" in caller.receive()
    caller.send(HELLO)
    assert peer.has_hung_up(caller.sock, 1)
    caller.sock.close()
    with pytest.raises(ClusterError, match="process 1 .* came, and ended before all"):
        zero.result(10)


def test_a_slow_trickle_is_cut_off(address, attend, pool, monkeypatch):
    """A byte now and then does not hold a place for ever."""
    monkeypatch.setattr(_rendezvous, "HELLO_SECONDS", 0.6)
    zero = pool.submit(attend, 0)
    with peer.call(address) as sock:
        stranger = peer.Peer(sock).greet().hear()
        sock.settimeout(0.02)
        sent = 0
        with contextlib.suppress(ConnectionError):
            for byte in stranger.frame(b" " * 60_000):
                sock.sendall(bytes([byte]))
                sent += 1
                with contextlib.suppress(TimeoutError):
                    assert sock.recv(1) == b""
                    break
        assert sent < 600
    assert meets(zero, attend)


# Many callers


@pytest.fixture
def descriptors():
    """Room for both ends of a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_idle_callers_do_not_stop_a_job(address, attend, pool, descriptors):
    zero = pool.submit(attend, 0)
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            idle = stack.enter_context(peer.call(address))
            with contextlib.suppress(ConnectionError):  # those that had to make room
                idle.sendall(peer.GREETING + bytes(31) if number % 2 else b"")
        assert meets(zero, attend)


# Meetings need the standard library only.
ALONE = f"""
import os, resource, sys, types
package = types.ModuleType("jaxstrategy")
package.__path__ = [{str(pathlib.Path(jaxstrategy.__file__).parent)!r}]
sys.modules["jaxstrategy"] = package
from jaxstrategy.processes import _rendezvous
RANK = int(os.environ["JAXSTRATEGY_PROCESS_ID"])
def meet():
    return _rendezvous.meet(RANK, 2, os.environ["JAXSTRATEGY_COORDINATOR"], 30)
"""


def test_more_callers_than_descriptors_do_not_stop_a_job(job, tmp_path):
    go = tmp_path / "go"
    scripts = {
        0: """
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        meeting = meet()
        print("met", len(meeting.members))
        """,
        1: f"""
        import time
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)
        print("met", len(meet().members))
        """,
    }
    scripts = {rank: ALONE + textwrap.dedent(text) for rank, text in scripts.items()}
    with (
        job(scripts=scripts, started=False) as running,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(200):
            stack.enter_context(peer.call(running.address))
        go.touch()
        assert running.wait(30) == [0, 0]
        assert [rank.last_line for rank in running.ranks] == ["met 2", "met 2"]


# Messages on the board


@pytest.fixture
def three(address, pool, attend, board):
    """Boards of processes 0 and 2, and the bare connection of process 1."""
    with contextlib.ExitStack() as stack:

        def made():
            calls = [pool.submit(attend, index, 3) for index in (0, 2)]
            one = peer.guest(address, {**HELLO, "host": "h1", "pid": 1, "count": 3})
            stack.callback(one.sock.close)
            assert "seconds" in one.receive() and one.receive()["verdict"] == ""
            return one, *(board(call.result(20)) for call in calls)

        yield made


def check_ends_alone(one, zero, two):
    """Process 1 is out, and the others go on."""
    assert peer.has_hung_up(one.sock)
    until(lambda: two.states()[1].end)
    zero.put("key", 1)
    assert two.get("key") == 1
    assert [state.end for state in two.states()] == [None, "failed", None]
    for end in (two, zero):
        end.fail("over")


NO_MESSAGES = [
    b"[" * 100_000,
    b"\xff",
    b"",
    "alive",
    {"op": []},
    {"op": "conquer"},
    {"op": "alive", "status": STATUS | {"step": "many"}},
    {"op": "alive", "status": {"step": 3}},
    {"op": "left", "status": STATUS | {"arrivals": None}},
    {"op": "failed", "text": 3},
    {"op": "put", "key": [], "value": 1},
    {"op": "get", "id": "one", "key": "k"},
    {"op": "gather", "id": 1, "key": ["k"], "value": 1},
    {"op": "cancel", "id": 1, "cancelled": "all"},
    {"op": "states"},
]


def test_a_message_that_is_none_ends_its_sender_alone(three):
    for message in NO_MESSAGES:
        one, zero, two = three()
        told = []
        two.on_departure(lambda departure, told=told: told.append(str(departure)))
        one.send(message)
        until(lambda told=told: told)
        wanted = "process 1 (host h1, pid 1) failed: its messages make no"
        assert told[0].startswith(wanted), message
        check_ends_alone(one, zero, two)


def test_a_length_beyond_all_measure_ends_its_sender_alone(three):
    one, zero, two = three()
    one.sock.sendall(((256 << 20) + 1).to_bytes(4, "big"))
    until(lambda: two.states()[1].text)
    assert "a message of 268435457 bytes was announced" in two.states()[1].text
    check_ends_alone(one, zero, two)


@contextlib.contextmanager
def false_process_0(pool, attend):
    """The bare connection of process 0, and what comes of process 1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = f"127.0.0.1:{listener.getsockname()[1]}"
        one = pool.submit(attend, 1, at=at)
        zero = peer.Peer(listener.accept()[0], is_host=True).hear().greet()
    zero.receive()
    with zero.sock:
        yield zero, one


def test_what_process_0_says_wrong_is_an_error_that_says_so(pool, attend, board):
    for message in [
        b"[" * 100_000,
        [],
        {"op": "ended", "process": 7, "end": "died", "text": "", "status": None},
        {"op": "ended", "process": 0},
        {"id": 0, "gone": [[9, "died", ""]]},
        {"id": 0, "gone": [0]},
        {"id": [], "value": 1},
    ]:
        with false_process_0(pool, attend) as (zero, one):
            zero.send({"verdict": "", "members": [[0, "h0", 0], [1, "h1", 1]]})
            call = pool.submit(board(one.result(10)).gather, "key", 1, 10)
            assert zero.receive()["op"] == "gather"
            zero.send(message)
            with pytest.raises(ClusterError, match="0 .* failed: its messages make no"):
                call.result(10)


def test_a_verdict_that_is_none_is_an_error_that_says_so(pool, attend):
    for word in [
        [],
        {"seconds": "many"},
        {"verdict": 3},
        {"verdict": "", "members": [[0, "h0", 0]]},
        {"verdict": "", "members": [[0, "h0", 0], [7, "h1", 1]]},
        {"verdict": "", "members": [[0, "h0", 0], [1]]},
    ]:
        with false_process_0(pool, attend) as (zero, one):
            zero.send(word)
            with pytest.raises(ClusterError, match="stopped answering before all proc"):
                one.result(10)


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


# Anything


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
words = st.sampled_from(
    ["op", "id", "key", "value", "status", "text", "cancelled", "index", "count",
     "host", "pid", "job", "versions", "alive", "put", "get", "gather", "cancel",
     "states", "failed", "left", "verdict", "members", "seconds", "gone", "ping"]
)  # fmt: skip
anything = st.recursive(
    scalars | words,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(words | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)
right = st.sampled_from(
    [
        {"op": "alive", "status": None},
        {"op": "alive", "status": STATUS},
        {"op": "put", "key": "k", "value": [1]},
        {"op": "get", "id": 1, "key": "k"},
        {"op": "gather", "id": 2, "key": "k", "value": 1},
        {"op": "cancel", "id": 3, "cancelled": 2},
        {"op": "states", "id": 4},
        {"op": "failed", "text": "no"},
        {"op": "left", "status": None},
    ]
)


@st.composite
def nearly_right(draw):
    """A message with one field changed or left out."""
    message = dict(draw(right))
    name = draw(st.sampled_from(sorted(message)))
    if draw(st.booleans()):
        del message[name]
    else:
        message[name] = draw(anything)
    return message


@given(st.lists(right | nearly_right() | anything, max_size=6), st.binary(max_size=60))
@settings(parent=BOUNDED, max_examples=25)
def test_nothing_that_one_sends_ends_the_others(three, messages, rest):
    one, zero, two = three()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for message in messages:
            one.send(message)
        one.sock.sendall(rest)
    two.put("still", "there")
    assert zero.get("still", 20) == "there"
    one.sock.close()
    for end in (two, zero):
        end.fail("over")


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4))
@settings(parent=BOUNDED, max_examples=25)
def test_no_bytes_of_strangers_stop_a_meeting(address, attend, pool, said):
    """Plain bytes, and bytes behind a greeting or in frames with right seals."""
    zero = pool.submit(attend, 0)
    with contextlib.ExitStack() as stack, contextlib.suppress(ConnectionError):
        for number, data in enumerate(said):
            sock = stack.enter_context(peer.call(address))
            if number % 3 == 0:
                sock.sendall(data)
                continue
            caller = peer.Peer(sock).greet().hear()
            sock.sendall(data if number % 3 == 1 else caller.frame(data))
    assert meets(zero, attend)
