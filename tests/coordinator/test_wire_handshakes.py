"""Nobody but the job's own processes gets as far as a frame."""

import contextlib
import os
import random
import socket
import stat
import threading
import warnings

import numpy as np
import pytest
from helpers.peers import PlainServer, PlainWorker, until
from helpers.threads import Started

import jaxstrategy as js
from jaxstrategy.parameter_servers._operations import Read
from jaxstrategy.parameter_servers.wire import _handshake, _pickled
from jaxstrategy.parameter_servers.wire._frame import WireFrame
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._listener import Listener, dialled
from jaxstrategy.parameter_servers.wire._peer import Peer
from jaxstrategy.parameter_servers.wire._remote_server import RemoteServer
from jaxstrategy.parameter_servers.wire._remote_worker import RemoteWorker
from jaxstrategy.parameter_servers.wire._responder import Responder
from jaxstrategy.parameter_servers.wire._server_answers import ServerAnswers
from jaxstrategy.parameter_servers.wire._worker_answers import WorkerAnswers
from jaxstrategy.processes._channel import GREETING, NONCE_BYTES
from jaxstrategy.processes._secret import NETWORK, Secret

SECRET = Secret("a secret of the tests")
OTHER = Secret("another secret, not it")


@pytest.fixture(params=["tcp", "unix"])
def address(request, tmp_path):
    tmp_path.chmod(0o700)
    return "127.0.0.1:0" if request.param == "tcp" else str(tmp_path / "socket")


class Host:
    """A listener, whose streams a responder answers."""

    def __init__(self, address, answers, secret=SECRET, **options):
        self.responder = Responder(answers)
        self.streams = []
        self.listener = Listener(address, secret, **options)
        self.listener.start(self.take)
        self.address = self.listener.address

    def take(self, stream):
        self.streams.append(stream)
        self.responder.add(stream)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()
        self.responder.close()

    def called(self):
        """A socket that has connected, and has said nothing yet."""
        if "/" in self.address:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self.address)
        else:
            host, _, port = self.address.rpartition(":")
            sock = socket.create_connection((host, int(port)))
        sock.settimeout(60)
        return sock


def peer(host, secret=SECRET, lost=js.ParameterServerLost):
    return Peer("Server 0", lambda: dialled(host.address, secret), lost)


def test_servers_are_asked_over_addresses(address):
    with Host(address, ServerAnswers(PlainServer())) as host:
        server = RemoteServer(peer(host))
        value = np.arange(50_000.0)
        server.create(1, value)
        np.testing.assert_array_equal(server.read([Read(1)])[0], value)
        assert host.streams[0].is_trusted
        server.close()


def test_workers_are_asked_over_addresses(address):
    with Host(address, WorkerAnswers(PlainWorker())) as host:
        worker = RemoteWorker(peer(host, lost=js.WorkerLost))
        worker.build(1, lambda index: np.arange(index))
        np.testing.assert_array_equal(worker.own(1), [0, 1, 2])
        worker.close()


@pytest.mark.parametrize("secret", [OTHER, Secret()], ids=["another", "none"])
def test_who_has_another_secret_is_refused(address, secret, monkeypatch):
    monkeypatch.setenv(NETWORK, "trusted")
    with Host(address, ServerAnswers(PlainServer())) as host:
        own = "one" if secret else "none"
        with pytest.raises(
            js.ClusterError,
            match=rf"has another JAXSTRATEGY_CLUSTER_SECRET .* has {own}\.",
        ):
            dialled(host.address, secret)
        assert not host.streams


def test_who_listens_with_another_secret_is_refused(address):
    """The guest, too, asks for a proof before it reads a frame."""
    with Host(address, ServerAnswers(PlainServer()), OTHER) as host:
        server = RemoteServer(peer(host))
        with pytest.raises(js.ClusterError, match="has another"):
            server.versions([1])


def test_the_secret_never_travels(address):
    seen = []
    with Host(address, ServerAnswers(PlainServer())) as host:
        here, there = socket.socketpair()
        near, far = host.called(), there

        def forward(source, target):
            while data := source.recv(1 << 16):
                seen.append(data)
                target.sendall(data)

        threads = [
            threading.Thread(target=forward, args=pair)
            for pair in ((near, far), (far, near))
        ]
        for thread in threads:
            thread.start()
        stream = _handshake.greeted(here, SECRET, "there")
        stream.send(WireFrame(Kind.VERSIONS, [1]))
        assert stream.receive().fields == [0]
        stream.close()
        host.listener.close()
        host.responder.close()
        for thread in threads:
            thread.join(60)
        near.close()
        far.close()
    text = b"".join(seen)
    assert len(text) > 200
    assert b"secret of the tests" not in text


def test_a_recorded_connection_cannot_be_played_again(address):
    with Host(address, ServerAnswers(server := PlainServer())) as host:
        here, there = socket.socketpair()
        near, said = host.called(), []

        def forward(source, target, keep):
            while data := source.recv(1 << 16):
                if keep:
                    said.append(data)
                target.sendall(data)

        threads = [
            threading.Thread(target=forward, args=args)
            for args in ((there, near, True), (near, there, False))
        ]
        for thread in threads:
            thread.start()
        stream = _handshake.greeted(here, SECRET, "there")
        stream.send(WireFrame(Kind.FENCE, [1, 1]))
        assert stream.receive().kind == Kind.DONE
        assert server.fences == [(1, 1)]
        stream.close()
        with host.called() as again:
            again.sendall(b"".join(said))
            while again.recv(1 << 16):
                pass  # until it is hung up on
        assert server.fences == [(1, 1)]
        assert len(host.streams) == 1
        near.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(60)
        near.close()
        there.close()


GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "a frame without handshake": b"\xa7\x10" + bytes(26),
    "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "greeting and zeros": GREETING + bytes(NONCE_BYTES + 200),
    "greeting and a huge message": GREETING + bytes(NONCE_BYTES) + b"\xff\xff\xff\xf0",
    "half a greeting": GREETING[:5],
}


@pytest.mark.parametrize("name", GARBAGE)
def test_strangers_are_hung_up_on(address, name, monkeypatch):
    def never(*_):
        raise AssertionError("it was unpickled")

    monkeypatch.setattr(_pickled, "loaded", never)
    with Host(address, WorkerAnswers(PlainWorker()), seconds=1.0) as host:
        with host.called() as sock:
            sock.sendall(GARBAGE[name])
            try:
                while sock.recv(1 << 16):
                    pass
            except ConnectionResetError:
                pass  # it did not even read all
        assert not host.streams
        dialled(host.address, SECRET).close()  # the others are served


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_before_the_proof_do_nothing(address, seed):
    random_ = random.Random(seed)
    with Host(address, WorkerAnswers(PlainWorker()), seconds=0.2) as host:
        for _ in range(20):
            with host.called() as sock:
                begin = GREETING if random_.random() < 0.5 else b""
                try:
                    sock.sendall(begin + random_.randbytes(random_.randrange(4000)))
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 16):
                        pass
                except OSError:
                    pass  # it hung up first
        assert not host.streams


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_after_the_proof_end_that_connection_only(address, seed):
    random_ = random.Random(seed)
    with Host(address, ServerAnswers(PlainServer())) as host:
        good = RemoteServer(peer(host))
        good.create(1, np.ones(3))
        for _ in range(10):
            stream = dialled(host.address, SECRET)
            data = random_.randbytes(random_.randrange(28, 3000))
            stream._sock.sendall(b"\xa7" + data if random_.random() < 0.7 else data)
            stream._sock.shutdown(socket.SHUT_WR)
            with pytest.raises((EOFError, ConnectionError)):
                stream.receive()
            stream.close()
        assert good.read([Read(1)])[0].tolist() == [1, 1, 1]
        good.close()


WRONG = (None, 5, "x", [[]], {"a": 1}, [["1", True]], [1.5, 2.5], [None, [[1]]])


@pytest.mark.parametrize("kind", [Kind.READ, Kind.PUSH, Kind.CREATE, Kind.FENCE, 99])
def test_requests_of_another_form_are_answered_with_an_error(address, kind):
    with Host(address, ServerAnswers(PlainServer())) as host:
        asked = peer(host)
        for fields in WRONG:
            with pytest.raises((ValueError, TypeError, KeyError, RuntimeError)):
                asked.ask(WireFrame(kind, fields))
        assert asked.ask(WireFrame(Kind.VERSIONS, [])).fields == []
        asked.close()


def test_who_does_not_finish_is_hung_up_on_and_others_are_not_kept_waiting(address):
    with Host(address, ServerAnswers(PlainServer()), seconds=60) as host:
        slow = [host.called() for _ in range(80)]
        dialled(host.address, SECRET).close()
        for sock in slow:
            sock.close()


def test_a_listener_that_closes_hangs_up_on_strangers_only(address):
    with Host(address, ServerAnswers(PlainServer()), seconds=60) as host:
        server = RemoteServer(peer(host))
        server.create(1, np.ones(2))
        with host.called() as stranger:
            until(lambda: len(host.listener._threads) >= 2)
            host.listener.close()
            host.listener.close()
            # Who was not accepted yet is reset: the system does that to the ones in the
            # listener's queue.
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
        assert server.read([Read(1)])[0].tolist() == [1, 1]
        with pytest.raises(ConnectionError, match="does not answer"):
            dialled(host.address, SECRET)
        server.close()


def test_only_one_address_is_bound():
    for every in ("0.0.0.0:0", "[::]:0", "0.0.0.0:2222"):
        with pytest.raises(js.ClusterError, match="every address of this host"):
            Listener(every, SECRET)
    listener = Listener("127.0.0.1:0", SECRET)
    assert listener.address.startswith("127.0.0.1:")
    listener.close()


def test_beyond_this_host_a_secret_is_wanted(monkeypatch):
    for make in (Listener, dialled):
        with pytest.raises(js.ClusterError, match="the job has no secret"):
            make("192.0.2.1:2222", Secret())


def test_without_a_secret_loopback_carries_numbers_but_nothing_that_runs(monkeypatch):
    monkeypatch.delenv(NETWORK, raising=False)
    plain = PlainWorker()
    with Host("127.0.0.1:0", ServerAnswers(PlainServer()), Secret()) as host:
        server = RemoteServer(peer(host, Secret()))
        server.create(1, np.ones(2))
        assert server.read([Read(1)])[0].tolist() == [1, 1]
        with pytest.raises(KeyError, match="9") as caught:
            server.read([Read(9)])  # by name: nothing was unpickled here either
        assert "Traceback of Server 0" in caught.value.__notes__[0]
        with pytest.raises(js.ClusterError, match="server runs the programs .* JAXSTR"):
            server.define("key", b"a program")
        server.close()
    with Host("127.0.0.1:0", WorkerAnswers(plain), Secret()) as host:
        worker = RemoteWorker(peer(host, Secret(), js.WorkerLost))
        with pytest.raises(js.ClusterError, match="the job has no secret"):
            worker.build(1, lambda index: index)
        worker.close()
    assert not plain.resources
    monkeypatch.setenv(NETWORK, "trusted")
    with Host("127.0.0.1:0", WorkerAnswers(plain), Secret()) as host:
        worker = RemoteWorker(peer(host, Secret(), js.WorkerLost))
        worker.build(1, lambda index: index)
        worker.close()
    assert plain.resources == {1: 3}


def test_errors_of_who_may_be_a_stranger_are_never_unpickled(monkeypatch):
    monkeypatch.delenv(NETWORK, raising=False)

    def answer(request, stream):
        blob = _pickled.dumped_plainly(ValueError("pickled"))[0]
        return WireFrame(Kind.FAILED, {"type": "KeyError", "args": ["plain"]}, blob)

    with Host("127.0.0.1:0", answer, Secret()) as host:
        asked = peer(host, Secret())
        with pytest.raises(RuntimeError, match="KeyError"):
            asked.ask(WireFrame(64))
        asked.close()


def test_a_socket_that_other_users_reach_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    for make in (Listener, dialled):
        with pytest.raises(js.ClusterError, match="has the mode 755"):
            make(str(tmp_path / "socket"), SECRET)


def test_a_unix_socket_needs_no_secret_and_leaves_no_file(tmp_path):
    tmp_path.chmod(0o700)
    path = str(tmp_path / "socket")
    with Host(path, WorkerAnswers(PlainWorker()), Secret()) as host:
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        worker = RemoteWorker(peer(host, Secret(), js.WorkerLost))
        worker.release([])
        worker.close()
    assert not os.path.exists(path)


def test_another_version_is_named(address, monkeypatch):
    with Host(address, ServerAnswers(PlainServer())) as host:
        monkeypatch.setattr(_handshake, "_PROTOCOL", "jaxstrategy-frames/0 little")
        sock = host.called()
        monkeypatch.undo()

        def welcome():
            with pytest.raises(js.ClusterError, match="'jaxstrategy-frames/0"):
                _handshake.welcomed(there, SECRET)

        here, there = socket.socketpair()
        thread = threading.Thread(target=welcome)
        thread.start()
        own = {
            "protocol": "jaxstrategy-frames/0 little",
            "nonce": "00" * 32,
            "told": {},
        }
        monkeypatch.setattr(_handshake, "_own_hello", lambda *_: own)
        with pytest.raises(ConnectionError, match="there does not answer"):
            _handshake.greeted(here, SECRET, "there")
        thread.join()
        sock.close()


def test_both_ends_say_who_they_are(address):
    def answer(heard):
        if heard.get("worker") != 3:
            raise js.ClusterError(f"Worker 3 was wanted, not {heard}.")
        return {"server": 1, "knows": heard}

    with Host(address, ServerAnswers(PlainServer()), answer=answer) as host:
        stream = dialled(host.address, SECRET, told={"worker": 3})
        assert stream.heard == {"server": 1, "knows": {"worker": 3}}
        until(lambda: host.streams)
        assert host.streams[0].heard == {"worker": 3}
        stream.close()
        with pytest.raises(js.ClusterError, match=r"^Worker 3 was wanted, not {}\.$"):
            dialled(host.address, SECRET)
        assert len(host.streams) == 1


def test_a_peer_that_comes_up_later_is_waited_for(tmp_path):
    tmp_path.chmod(0o700)
    path = str(tmp_path / "socket")
    with pytest.raises(ConnectionError, match="socket does not answer"):
        dialled(path, SECRET)
    found = []
    thread = threading.Thread(target=lambda: found.append(dialled(path, SECRET, 60)))
    thread.start()
    with Host(path, ServerAnswers(PlainServer())):
        thread.join(60)
        found[0].close()


def test_a_peer_that_accepts_and_says_nothing_is_given_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionError, match="does not answer"):
            dialled(address, SECRET, seconds=0.1)


def test_no_socket_and_no_thread_is_left(address):
    threads = Started()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for _ in range(3):
            with Host(address, ServerAnswers(PlainServer())) as host:
                server = RemoteServer(peer(host))
                server.create(1, np.ones(2))
                server.close()
    assert not threads()
