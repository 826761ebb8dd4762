"""Whatever is sent ends one connection, and never process 0 or the job."""

import collections
import contextlib
import errno
import json
import pathlib
import resource
import socket
import textwrap
import time

import hypothesis.strategies as st
import peer
import pytest
from harness import STATUS, VERSIONS, until
from hypothesis import HealthCheck, given, settings

import jaxstrategy
from jaxstrategy import ClusterError
from jaxstrategy.cluster.board import _board_messages
from jaxstrategy.cluster.board._hub import Hub
from jaxstrategy.cluster.board._shared_board import Board
from jaxstrategy.cluster.connections import _channel
from jaxstrategy.cluster.connections._channel import Channel
from jaxstrategy.cluster.connections._secret import Secret
from jaxstrategy.cluster.connections._wire import (
    Connection,
    endpoint,
)
from jaxstrategy.cluster.meeting import (
    _caller,
    _first_process,
    _meeting_messages,
    _rendezvous,
)
from jaxstrategy.cluster.meeting._first_process import Host

HELLO = {"index": 1, "count": 2, "host": "h", "pid": 7, "versions": VERSIONS}
BOUNDED = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def attend(address, join):
    def attended(index, count=2, seconds=20):
        hello = {"host": f"h{index}", "pid": index, "versions": VERSIONS}
        return join(index, count, address, seconds, hello)

    return attended


def meets(zero, attend):
    """The job still meets when its own process comes."""
    one = attend(1)
    return len(zero.result(10).members) == len(one.members) == 2


# Hellos


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"[" * 60_000,
        b"[" * 60_000 + b"]" * 1000,
        b'{"index": 1, "count": 2, "host": ' + b"[" * 500 + b"]" * 500 + b"}",
        b"\xff\xfe" + json.dumps(HELLO).encode("utf-16-le"),
        b'{"index": 1',
        b"NaN",
        b"1" * 5000,
        [],
        [1],
        3,
        None,
        "hello",
        {},
        {"index": 1},
        HELLO | {"index": "1"},
        HELLO | {"index": True},
        HELLO | {"index": 1.0},
        HELLO | {"index": -1},
        HELLO | {"index": 10**400},
        HELLO | {"count": None},
        HELLO | {"versions": 5},
        HELLO | {"versions": {"jax": {}}},
        HELLO | {"versions": []},
        HELLO | {"host": 1},
        HELLO | {"host": "h" * 2000},
        HELLO | {"pid": "7"},
        HELLO | {"job": {}},
    ],
    ids=lambda hello: repr(hello)[-40:],
)
def test_a_hello_that_is_none_is_dropped_alone(hello, address, attend, pool):
    zero = pool.submit(attend, 0)
    with peer.guest(address, hello).sock as stranger:
        assert peer.read(stranger, 1000) == b""
    assert meets(zero, attend)


def test_who_says_hello_twice_is_dropped(address, attend, pool):
    zero = pool.submit(attend, 0, 3, 2)
    caller = peer.guest(address, HELLO | {"count": 3})
    assert "seconds" in caller.receive()
    caller.send(HELLO)
    assert peer.has_hung_up(caller.sock, 1)
    caller.sock.close()
    with pytest.raises(ClusterError, match="process 1 .* came, and ended before all"):
        zero.result(10)


@pytest.mark.parametrize(
    "length",
    [_channel.FIRST + 1, _channel.LARGEST, (1 << 32) - 2, (1 << 32) - 1],
)
def test_a_hello_may_have_64_kilobytes(length, address, attend, pool):
    """More is not even waited for."""
    assert _channel.FIRST == 65536
    zero = pool.submit(attend, 0)
    with peer.call(address) as sock:
        peer.Peer(sock).greet().hear()
        sock.sendall(length.to_bytes(4, "big"))
        assert peer.read(sock, 1000, _caller.HELLO_SECONDS / 2) == b""
    assert meets(zero, attend)


def test_a_slow_trickle_is_cut_off(address, attend, pool, monkeypatch):
    """A byte now and then does not hold a place for ever."""
    monkeypatch.setattr(_caller, "HELLO_SECONDS", 0.6)
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


@pytest.mark.parametrize("words", [b"", peer.GREETING + bytes(31)], ids=["", "half"])
def test_a_thousand_idle_callers_do_not_stop_a_job(
    words, address, attend, pool, descriptors
):
    zero = pool.submit(attend, 0)
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            idle = stack.enter_context(peer.call(address))
            with contextlib.suppress(ConnectionError):  # those that had to make room
                idle.sendall(words)
        assert meets(zero, attend)


def test_callers_that_go_on_coming_do_not_stop_a_job(
    address, attend, pool, descriptors
):
    zero = pool.submit(attend, 0)
    peer.call(address).close()  # it listens
    one = pool.submit(attend, 1)
    idle = collections.deque()
    with contextlib.suppress(OSError):  # until nobody listens any more
        for _ in range(20_000):
            idle.append(socket.create_connection(endpoint(address), 2))
            if len(idle) > 500:
                idle.popleft().close()
            if one.done():
                break
    assert len(one.result(10).members) == len(zero.result(10).members) == 2
    for sock in idle:
        sock.close()


# Meetings need the standard library only.
ALONE = f"""
import os, resource, sys, types
package = types.ModuleType("jaxstrategy")
package.__path__ = [{str(pathlib.Path(jaxstrategy.__file__).parent)!r}]
sys.modules["jaxstrategy"] = package
from jaxstrategy.cluster.meeting import _rendezvous
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


class Full:
    """A listener of a process that has no descriptors left for a while.

    Args:
      failures: how many calls fail.
      first: how many succeed before.
    """

    def __init__(self, listener, failures, first=0):
        self._listener = listener
        self._failures = range(first, first + failures)
        self.calls = 0

    def fileno(self):
        return self._listener.fileno()

    def accept(self):
        self.calls += 1
        if self.calls - 1 in self._failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()


def host_of(listener, address, seconds):
    hello = {**HELLO, "index": 0}
    return Host(listener, hello, address, time.monotonic() + seconds, seconds, Secret())


def test_who_has_no_descriptors_left_waits_before_it_tries_again():
    """The call that waits would wake it again and again."""
    with socket.create_server(("127.0.0.1", 0)) as real:
        address = f"127.0.0.1:{real.getsockname()[1]}"
        listener = Full(real, 1_000_000)
        with peer.call(address), pytest.raises(ClusterError, match="1 of 2 processes"):
            host_of(listener, address, 1.0).meet()
    assert 2 <= listener.calls <= 12


def test_who_has_no_descriptors_left_takes_those_of_strangers():
    with contextlib.ExitStack() as stack:
        real = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{real.getsockname()[1]}"
        listener = Full(real, 1_000_000, first=3)
        idle = [stack.enter_context(peer.call(address)) for _ in range(5)]
        with pytest.raises(ClusterError, match="1 of 2 processes"):
            host_of(listener, address, 1.0).meet()
        assert all(peer.has_hung_up(sock, 0.1) for sock in idle[:3])
    assert 3 + 3 <= listener.calls <= 3 + 3 + 12


def test_who_has_descriptors_again_goes_on(pool, join):
    with socket.create_server(("127.0.0.1", 0)) as real:
        real.setblocking(False)
        address = f"127.0.0.1:{real.getsockname()[1]}"
        zero = pool.submit(host_of(Full(real, 4), address, 10).meet)
        one = join(1, 2, address, 10, HELLO)
        meeting = zero.result(10)
        assert len(meeting.members) == len(one.members) == 2
        meeting.close()


def test_the_oldest_stranger_makes_room(address, attend, pool, monkeypatch):
    monkeypatch.setattr(_first_process, "_MOST_STRANGERS", 3)
    zero = pool.submit(attend, 0)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(peer.call(address)) for _ in range(5)]
        assert all(peer.has_hung_up(sock) for sock in idle[:2])
        assert not any(peer.has_hung_up(sock, 0.05) for sock in idle[2:])
        assert meets(zero, attend)


def test_strangers_that_speak_while_they_make_room(monkeypatch, pool, join):
    monkeypatch.setattr(_first_process, "_MOST_STRANGERS", 1)
    with contextlib.ExitStack() as stack:
        real = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        real.setblocking(False)
        address = f"127.0.0.1:{real.getsockname()[1]}"
        for _ in range(30):
            stack.enter_context(peer.call(address)).sendall(peer.GREETING)
        zero = pool.submit(host_of(real, address, 10).meet)
        one = join(1, 2, address, 10, HELLO)
        meeting = stack.enter_context(contextlib.closing(zero.result(10)))
        assert len(meeting.members) == len(one.members) == 2


@pytest.mark.parametrize("has_said", [False, True], ids=["greeting", "hello"])
def test_who_has_to_make_room_calls_again(has_said, address, attend, pool):
    host, port = endpoint(address)
    with socket.create_server((host, port)) as listener:
        one = pool.submit(attend, 1)
        with listener.accept()[0] as sock:
            zero = peer.Peer(sock, is_host=True).hear().greet()
            if has_said:
                assert zero.receive()["index"] == 1
    zero = pool.submit(attend, 0)
    assert len(zero.result(20).members) == len(one.result(20).members) == 2


# Messages on the board


@pytest.fixture
def three(address, pool):
    """Boards of processes 0 and 2, and the bare connection of process 1."""
    with contextlib.ExitStack() as stack:

        def made():
            calls = [
                pool.submit(_rendezvous.meet, index, 3, address, 20, told(index))
                for index in (0, 2)
            ]
            one = peer.guest(address, {**told(1), "index": 1, "count": 3})
            stack.callback(one.sock.close)
            assert "seconds" in one.receive() and one.receive()["verdict"] == ""
            boards = [Board(call.result(20)) for call in calls]
            for board in boards:
                stack.callback(board.fail, "the test is over")
            return one, *boards

        def told(index):
            return {"host": f"h{index}", "pid": index, "versions": VERSIONS}

        yield made


@pytest.mark.parametrize(
    "message",
    [
        b"[" * 100_000,
        b"{" * 100_000,
        b'{"op": "put", "key": "k", "value": ' + b"[" * 300 + b"]" * 300 + b"}",
        b"\xff",
        b"",
        [],
        ["op"],
        "alive",
        7,
        None,
        {},
        {"op": []},
        {"op": {}},
        {"op": "conquer"},
        {"op": "alive"},
        {"op": "alive", "status": [1]},
        {"op": "alive", "status": STATUS | {"step": "many"}},
        {"op": "alive", "status": {"step": 3}},
        *(
            {"op": "alive", "status": {k: v for k, v in STATUS.items() if k != name}}
            for name in STATUS
        ),
        *(
            {"op": "left", "status": STATUS | {name: None}}
            for name in ("step", "what", "arrivals", "reads")
        ),
        {"op": "left"},
        {"op": "failed", "text": 3},
        {"op": "put", "value": 1},
        {"op": "put", "key": "k"},
        {"op": "put", "key": [], "value": 1},
        {"op": "get", "id": 1, "key": {}},
        {"op": "get", "id": "one", "key": "k"},
        {"op": "gather", "id": 1, "key": ["k"], "value": 1},
        {"op": "gather", "key": "k", "value": 1},
        {"op": "cancel", "id": 1, "cancelled": "all"},
        {"op": "states"},
    ],
    ids=lambda message: repr(message)[-40:],
)
def test_a_message_that_is_none_ends_its_sender_alone(message, three):
    one, zero, two = three()
    told = []
    two.on_departure(lambda departure: told.append(str(departure)))
    one.send(message)
    assert peer.has_hung_up(one.sock)
    until(lambda: told)
    assert told[0].startswith("process 1 (host h1, pid 1) failed: its messages make no")
    zero.put("key", 1)
    assert two.get("key") == 1
    assert [state.end for state in two.states()] == [None, "failed", None]


def test_a_length_beyond_all_measure_ends_its_sender_alone(three):
    one, zero, two = three()
    one.sock.sendall((_channel.LARGEST + 1).to_bytes(4, "big"))
    assert peer.has_hung_up(one.sock)
    zero.put("key", 1)
    assert two.get("key") == 1
    assert "a message of 268435457 bytes was announced" in two.states()[1].text


@pytest.mark.parametrize(
    "message",
    [
        b"[" * 100_000,
        [],
        {},
        {"op": "ended", "process": 7, "end": "died", "text": "", "status": None},
        {"op": "ended", "process": 0, "end": "gone", "text": "", "status": None},
        {"op": "ended", "process": 0},
        {"id": 0},
        {"id": 0, "gone": [[9, "died", ""]]},
        {"id": 0, "gone": [0]},
        {"id": [], "value": 1},
    ],
    ids=repr,
)
def test_what_process_0_says_wrong_is_an_error_that_says_so(message, pool, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        hello = {"host": "h1", "pid": 1, "versions": VERSIONS}
        one = pool.submit(_rendezvous.meet, 1, 2, address, 20, hello)
        zero = peer.Peer(listener.accept()[0], is_host=True).hear().greet()
    zero.receive()
    members = [[0, "h0", 0], [1, "h1", 1]]
    zero.send({"verdict": "", "members": members})
    board = Board(one.result(10))
    call = pool.submit(board.gather, "key", 1, 10)
    assert zero.receive()["op"] == "gather"
    zero.send(message)
    with pytest.raises(ClusterError, match="process 0 .* failed: its messages make no"):
        call.result(10)
    board.fail("the test is over")
    zero.sock.close()


@pytest.mark.parametrize(
    "word",
    [
        [],
        {},
        {"seconds": "many"},
        {"verdict": 3},
        {"verdict": ""},
        {"verdict": "", "members": [[0, "h0", 0]]},
        {"verdict": "", "members": [[0, "h0", 0], [7, "h1", 1]]},
        {"verdict": "", "members": [[0, "h0", 0], [1]]},
    ],
    ids=repr,
)
def test_a_verdict_that_is_none_is_an_error_that_says_so(word, pool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        hello = {"host": "h1", "pid": 1, "versions": VERSIONS}
        one = pool.submit(_rendezvous.meet, 1, 2, address, 20, hello)
        zero = peer.Peer(listener.accept()[0], is_host=True).hear().greet()
    zero.receive()
    zero.send(word)
    with pytest.raises(ClusterError, match="stopped answering before all processes"):
        one.result(10)
    zero.sock.close()


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


def test_who_says_too_much_hears_of_it_and_the_job_goes_on(boards, pool, monkeypatch):
    monkeypatch.setattr(_channel, "LARGEST", 1 << 20)
    zero, one = boards(2)
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        one.put("key", nested(100))
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        one.gather("key", nested(100_000))
    with pytest.raises(ValueError, match=r"10486\d+ bytes; processes tell each other"):
        one.put("key", "x" * (1 << 20))
    deepest = nested(99)
    both = pool.map(lambda board: board.gather("key", deepest), (zero, one))
    assert list(both) == [[deepest, deepest]] * 2


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


@given(anything | nearly_right())
@BOUNDED
def test_anything_can_be_asked_whether_it_is_a_message(value):
    for is_one in (_meeting_messages.is_hello, _board_messages.is_request):
        assert is_one(value) in (True, False)
    for is_one in (_meeting_messages.is_word, _board_messages.is_reply):
        assert is_one(value, 2) in (True, False)


@given(right)
@BOUNDED
def test_right_messages_are_messages(value):
    assert _board_messages.is_request(value)


def hub_of(count):
    """A hub, and the other ends of its connections."""
    ends, lines = [], {}
    for index in range(count):
        ours, hubs = socket.socketpair()
        end = peer.Peer(ours)
        end.other = bytes(32)
        end.nonce = bytes(32)
        ends.append(end)
        channel = Channel(Secret(), bytes(32), bytes(32), True, True)
        lines[index] = Connection(hubs, channel)
        end.sent = end.received = 1
    hub = Hub(lines, 30)
    hub.start()
    return hub, ends


@given(st.lists(right | nearly_right() | anything, max_size=6), st.binary(max_size=60))
@BOUNDED
def test_nothing_that_is_sent_ends_the_hub(messages, rest):
    hub, (zero, one, two) = hub_of(3)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for message in messages:
            one.send(message)
        one.sock.sendall(rest)
    two.send({"op": "put", "key": "still", "value": "there"})
    zero.send({"op": "get", "id": 5, "key": "still"})
    answer = {"id": 5, "value": "there"}
    heard = []
    while answer not in heard:  # what became of process 1 may come first
        heard.append(zero.receive())
        assert len(heard) < 50
    for end in (zero, one, two):
        end.sock.close()
    hub.join(10)
    assert not hub._thread.is_alive()


@given(
    st.lists(anything.filter(lambda v: v == v), max_size=5),
    st.lists(st.integers(1, 400), min_size=1, max_size=30),
    st.none() | st.integers(0, 10_000),
)
@BOUNDED
def test_what_arrives_is_what_was_sent_or_an_error(sent, cuts, broken):
    """However the stream is cut; after a byte that was changed nothing is believed."""
    secret, nonces = Secret("a secret of a test"), (bytes(32), b"\x01" * 32)
    guest = Channel(secret, *nonces, False)
    host = Channel(secret, *nonces, True)
    frames = [guest.packed(message) for message in sent]
    stream = bytearray(b"".join(frames))
    whole = len(sent)
    if broken is not None and stream:
        place = broken % len(stream)
        stream[place] ^= 1 << broken % 8
        ends = [sum(map(len, frames[: k + 1])) for k in range(len(frames))]
        whole = sum(end <= place for end in ends)
    heard = []
    with contextlib.suppress(ValueError):
        for cut in [*cuts, len(stream)]:
            host.add(bytes(stream[:cut]))
            del stream[:cut]
            heard.extend(host.messages())
    assert json.dumps(heard) == json.dumps(sent[:whole])


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4))
@settings(parent=BOUNDED, max_examples=25)
def test_no_bytes_of_strangers_stop_a_meeting(address, join, pool, said):
    """Plain bytes, and bytes behind a greeting or in frames with right seals."""
    hello = {"host": "h", "pid": 1, "versions": VERSIONS}
    zero = pool.submit(join, 0, 2, address, 10, hello)
    with contextlib.ExitStack() as stack, contextlib.suppress(ConnectionError):
        for number, data in enumerate(said):
            sock = stack.enter_context(peer.call(address))
            if number % 3 == 0:
                sock.sendall(data)
                continue
            caller = peer.Peer(sock).greet().hear()
            sock.sendall(data if number % 3 == 1 else caller.frame(data))
    one = join(1, 2, address, 10, hello)
    assert len(zero.result(10).members) == len(one.members) == 2
    for meeting in (zero.result(), one):
        meeting.close()
