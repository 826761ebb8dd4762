"""Who is gone is noticed and named; who only computes for long is not gone."""

import errno
import gc
import os
import socket
import threading
import warnings

import numpy as np
import pytest
from helpers.peers import (
    PlainServer,
    PlainWorker,
    remote,
    remote_worker,
    served,
    until,
)
from helpers.threads import Started

import jaxstrategy as js
from jaxstrategy.parameter_servers._operations import CallNumber, Read
from jaxstrategy.parameter_servers._shipped_program import Call
from jaxstrategy.parameter_servers.wire import _door, _frame, _stream
from jaxstrategy.parameter_servers.wire._door import Door, attended
from jaxstrategy.parameter_servers.wire._frame import WireFrame
from jaxstrategy.parameter_servers.wire._heartbeat import Heartbeat
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._peer import Peer, dial_of
from jaxstrategy.parameter_servers.wire._remote_server import RemoteServer
from jaxstrategy.parameter_servers.wire._remote_worker import RemoteWorker
from jaxstrategy.parameter_servers.wire._responder import Responder
from jaxstrategy.parameter_servers.wire._server_answers import ServerAnswers
from jaxstrategy.parameter_servers.wire._stream import Stream
from jaxstrategy.parameter_servers.wire._worker_answers import WorkerAnswers

SHORT = 0.2  # seconds of patience
WAIT = Call(CallNumber(1), "wait", ())


def silent(**options):
    """A server whose other end is a socket that says nothing, and that socket."""
    here, there = socket.socketpair()
    peer = Peer(
        "Parameter server 4", dial_of([Stream(here)]), js.ParameterServerLost, **options
    )
    return RemoteServer(peer), there


def test_a_server_that_is_silent_for_too_long_is_lost():
    server, there = silent(patience=SHORT)
    with pytest.raises(
        js.ParameterServerLost,
        match=r"^Parameter server 4 is lost: it gave no sign of life for 0.2 s\.$",
    ):
        server.versions([1])
    there.close()


def test_a_server_that_takes_nothing_is_lost():
    server, there = silent(patience=SHORT)
    with pytest.raises(js.ParameterServerLost, match="no sign of life"):
        server.create(1, np.zeros(10_000_000))
    there.close()


def test_a_server_that_hangs_up_is_lost_with_its_last_output():
    output = "\n".join(f"line {k}" for k in range(100))
    server, there = silent(last_output=lambda: output)
    there.close()
    with pytest.raises(js.ParameterServerLost) as caught:
        server.versions([1])
    first, heading, *lines = str(caught.value).splitlines()
    assert first.startswith("Parameter server 4 is lost: it ended, or closed the conn")
    assert heading == "The last that it wrote:"
    assert lines == [f"line {k}" for k in range(80, 100)]


@pytest.mark.parametrize("output", [None, "", " \n"])
def test_nothing_is_said_of_an_output_that_is_empty(output):
    server, there = silent(last_output=lambda: output)
    there.close()
    with pytest.raises(js.ParameterServerLost) as caught:
        server.versions([1])
    assert "wrote" not in str(caught.value)


def test_who_asks_for_the_last_output_may_close_the_peer_from_another_thread():
    """Output is waited for until a process has ended, which others see, too."""
    server, there = silent(last_output=lambda: closed() or "the last words")
    there.close()

    def closed():
        thread = threading.Thread(target=server.close)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    for _ in range(2):
        with pytest.raises(js.ParameterServerLost, match="the last words"):
            server.versions([1])


def test_what_is_lost_stays_lost_for_all_threads():
    with served(ServerAnswers(plain := PlainServer())) as dial:
        streams = []

        def dialled():
            streams.append(dial())
            return streams[-1]

        server = RemoteServer(Peer("Server 1", dialled, js.ParameterServerLost))
        inside, go_on = threading.Barrier(2), threading.Event()

        def versions(numbers):
            if numbers:
                inside.wait(60)
                go_on.wait(60)
            return list(numbers)

        plain.versions = versions
        assert server.versions([]) == []
        caught = []

        def ask():
            with pytest.raises(js.ParameterServerLost) as error:
                server.versions([1])
            caught.append(str(error.value))

        thread = threading.Thread(target=ask)
        thread.start()
        inside.wait(60)
        streams[0]._sock.shutdown(socket.SHUT_RDWR)  # as if the process had ended
        thread.join(60)
        assert len(caught) == 1
        go_on.set()
        with pytest.raises(js.ParameterServerLost, match="Server 1 is lost: it ended"):
            server.versions([])
        assert len(streams) == 1


@pytest.mark.parametrize("part", [0.1, 0.6, 0.999])
def test_a_server_that_dies_in_the_middle_of_an_answer_is_lost(part):
    server, there = silent()
    answer = WireFrame(Kind.DONE, None, b"", (np.ones(50_000),))
    head, contents = _frame.packed(answer, 1 << 30)
    data = head + b"".join(contents)

    def die():
        there.recv(1000)
        there.sendall(data[: int(len(data) * part)])
        there.close()

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(js.ParameterServerLost, match="it ended"):
        server.read([Read(1)])
    thread.join()


def test_a_server_that_speaks_another_language_is_lost():
    server, there = silent()
    there.sendall(b"220 mail.example.org ESMTP ready, what is it?\r\n")
    with pytest.raises(js.ParameterServerLost, match="no message of this protocol"):
        server.versions([1])
    there.close()


def test_a_server_that_cannot_be_reached_is_lost():
    def dial():
        raise ConnectionRefusedError("nobody listens")

    server = RemoteServer(Peer("Server 2", dial, js.ParameterServerLost))
    with pytest.raises(js.ParameterServerLost, match=r"reached \(nobody listens"):
        server.versions([1])


def test_a_client_that_dies_in_the_middle_of_a_request_changes_nothing():
    with served(ServerAnswers(plain := PlainServer())) as dial:
        stream = dial()
        head, contents = _frame.packed(
            WireFrame(Kind.CREATE, [1, False], b"", (np.ones(50_000),)), 1 << 30
        )
        stream._sock.sendall((head + b"".join(contents))[:-1])
        stream.close()
        other = Peer("Server", dial, js.ParameterServerLost)
        RemoteServer(other).create(2, np.ones(1))
        other.close()
    assert list(plain.values) == [2]


def counting(stream):
    """Count the frames of each kind that a stream receives."""
    kinds, receive = [], Stream.receive

    class Counted:
        def __getattr__(self, name):
            return getattr(stream, name)

        def receive(self):
            frame = receive(stream)
            kinds.append(frame.kind)
            return frame

    return Counted(), kinds


def test_a_worker_that_computes_for_longer_than_the_patience_is_not_lost():
    worker = PlainWorker()
    with served(WorkerAnswers(worker)) as dial:
        stream, kinds = counting(dial())
        peer = Peer("Worker 0", dial_of([stream]), js.WorkerLost, patience=1.0)
        found = []
        thread = threading.Thread(
            target=lambda: found.append(RemoteWorker(peer).call(WAIT))
        )
        thread.start()
        # More signs than fit into the patience: it would have been lost by now.
        until(lambda: kinds.count(Kind.ALIVE) >= 6)
        worker.go_on.set()
        thread.join(60)
        assert found == [[]]
        peer.close()


@pytest.mark.slow
def test_a_worker_that_compiles_gives_signs_of_life():
    """XLA compiles and runs without the interpreter, so that other threads go on."""
    with remote_worker(PlainWorker(), patience=2.0) as worker:

        def build(index):
            import jax
            import jax.numpy as jnp

            def deep(x):
                for k in range(60):
                    x = jnp.sin(x @ x.T + k)
                return x

            return np.asarray(jax.jit(deep)(np.ones((2, 2), np.float32)))

        worker.build(1, build)
        assert worker.own(1).shape == (2, 2)


def test_signs_of_life_do_not_pile_up_while_nobody_waits():
    beats = []
    with served(ServerAnswers(PlainServer())) as dial:
        stream = dial()
        stream.send(WireFrame(Kind.PATIENCE, 0.08))
        stream.send(WireFrame(Kind.VERSIONS, []))
        assert stream.receive().kind == Kind.DONE
        other = dial()  # the thread of signs works in turn for all
        other.send(WireFrame(Kind.PATIENCE, 0.08))
        busy = Heartbeat()
        here, there = _stream.pair()
        busy.add(there, 0.08)
        busy.begin(there)
        for _ in range(4):
            beats.append(here.receive().kind)
        busy.end(there)
        stream._sock.setblocking(False)
        with pytest.raises(TimeoutError):
            stream.receive()
        busy.close()
        for each in (stream, other, here, there):
            each.close()
    assert beats == [Kind.ALIVE] * 4


def test_signs_do_not_wait_for_who_does_not_read():
    here, there = _stream.pair()
    heartbeat = Heartbeat()
    heartbeat.add(here, 0.04)
    here._sock.setblocking(False)
    with pytest.raises(TimeoutError):
        while True:  # until the socket holds no more
            here.send(WireFrame(200, None, b"x" * 5000))
    here._sock.setblocking(True)
    other, others = _stream.pair()
    heartbeat.add(other, 0.04)
    heartbeat.begin(here)
    heartbeat.begin(other)
    for _ in range(3):
        assert others.receive().kind == Kind.ALIVE
    heartbeat.close()
    for each in (here, there, other, others):
        each.close()


def test_a_coordinator_that_goes_during_a_call_is_noticed():
    worker, lost = PlainWorker(), threading.Event()
    with served(WorkerAnswers(worker), lost.set) as dial:
        stream = dial()
        stream.send(WireFrame(Kind.PATIENCE, SHORT))
        stream.send(WireFrame(Kind.CALL, [[1, 0, 0, 0], "wait", []]))
        assert worker.began.wait(60)
        stream.close()
        assert lost.wait(60)
        worker.go_on.set()


@pytest.mark.parametrize("patience", [0, -1, "x", None, [1], 1e9])
def test_a_patience_that_is_none_ends_the_connection(patience):
    with served(ServerAnswers(PlainServer())) as dial:
        stream = dial()
        stream.send(WireFrame(Kind.PATIENCE, patience))
        with pytest.raises(EOFError):
            stream.receive()
        stream.close()


def test_a_process_that_starts_slowly_is_waited_for():
    here, there = socket.socketpair()
    peer = Peer("Worker 1", dial_of([Stream(here)]), js.WorkerLost, patience=0.5)
    responder = Responder(WorkerAnswers(PlainWorker()))
    began = threading.Event()

    def start():
        began.set()
        stream = Stream(there)
        assert stream.receive().kind == Kind.PATIENCE
        assert stream.receive().kind == Kind.PING
        stream.limit_silence(0.7)
        with pytest.raises(TimeoutError):  # so long it takes, more than the patience
            stream.receive()
        stream.limit_silence(None)
        stream.send(WireFrame(Kind.DONE))
        responder.serve(stream)

    thread = threading.Thread(target=start)
    thread.start()
    peer.wait_until_up(60)
    RemoteWorker(peer).release([1])
    peer.close()
    thread.join()
    responder.close()


def test_a_process_that_does_not_start_is_lost():
    server, there = silent(last_output=lambda: "ImportError: no module")
    with pytest.raises(js.ParameterServerLost, match="for 0.1 s.\n.*\nImportError"):
        server._peer.wait_until_up(0.1)
    there.close()


def test_an_answer_that_is_late_is_no_loss():
    worker = PlainWorker()
    with served(WorkerAnswers(worker)) as dial:
        peer = Peer("Worker 5", dial, js.WorkerLost, patience=1.0)
        request = WireFrame(Kind.CALL, [[1, 0, 0, 0], "wait", []])
        with pytest.raises(TimeoutError, match="^Worker 5 did not answer in time.$"):
            peer.ask(request, seconds=1.3)  # in spite of its signs of life
        with pytest.raises(TimeoutError, match="Worker 5 did not answer in time"):
            peer.ask(request, seconds=SHORT)
        with pytest.raises(TimeoutError, match="Worker 5 did not answer in time"):
            peer.ask(request, seconds=0)
        worker.go_on.set()
        assert peer.ask(request, seconds=60).kind == Kind.DONE
        assert peer.ask(request).kind == Kind.DONE
        peer.close()


def test_who_is_silent_is_lost_before_an_answer_is_late():
    server, there = silent(patience=SHORT)
    with pytest.raises(js.ParameterServerLost, match="no sign of life for 0.2 s"):
        server._peer.ask(WireFrame(64), seconds=60)
    there.close()


def test_an_answer_of_another_kind_is_none():
    server, there = silent()
    stream = Stream(there)
    stream.send(WireFrame(77))
    with pytest.raises(js.ParameterServerLost, match="answered with a message 77"):
        server.versions([1])
    stream.close()


@pytest.mark.parametrize("patience", [0, -1.0, 1e7])
def test_a_patience_must_be_seconds(patience):
    with pytest.raises(ValueError, match=r"The patience was .*; seconds from 0 to"):
        Peer("Worker 1", lambda: None, js.WorkerLost, patience)


def test_a_fork_does_not_ask_on_its_parents_connections(monkeypatch):
    with remote(PlainServer()) as server:
        server.create(1, np.ones(1))
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(js.ParameterServerLost, match="this one is a fork"):
            server.read([Read(1)])
        monkeypatch.undo()
        assert server.read([Read(1)])[0] == 1


def test_a_fork_that_closes_a_stream_does_not_close_its_parents(monkeypatch):
    here, there = _stream.pair()
    copy = Stream(socket.socket(fileno=os.dup(here.fileno())))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    copy.close()
    monkeypatch.undo()
    here.send(WireFrame(7))
    assert there.receive().kind == 7
    here.close()
    there.close()


def test_ctrl_c_leaves_no_answer_of_another_request():
    with served(ServerAnswers(PlainServer())) as dial:
        streams = []

        def dialled():
            stream = dial()
            receive = stream.receive
            streams.append(stream)
            if len(streams) == 1:

                class Interrupted:
                    def __getattr__(self, name):
                        return getattr(stream, name)

                    def receive(self):
                        receive()
                        raise KeyboardInterrupt

                return Interrupted()
            return stream

        server = RemoteServer(Peer("Server", dialled, js.ParameterServerLost))
        with pytest.raises(KeyboardInterrupt):
            server.create(1, np.ones(2))
        assert streams[0].is_closed
        assert server.read([Read(1)])[0].tolist() == [1, 1]
        server.close()


def test_streams_go_through_a_door():
    plain, responder = PlainServer(), None
    here, there = socket.socketpair()
    responder = Responder(ServerAnswers(plain))
    thread = threading.Thread(target=attended, args=(there, responder.add))
    thread.start()
    door = Door(here)
    server = RemoteServer(Peer("Server", door.dial, js.ParameterServerLost))
    server.create(1, np.ones(2))
    second = Door(door.another())  # such as a worker is given
    other = RemoteServer(Peer("Server", second.dial, js.ParameterServerLost))
    assert other.read([Read(1)])[0].tolist() == [1, 1]
    door.close()
    thread.join(60)  # the server sees that its parent is gone
    assert not thread.is_alive()
    assert server.read([Read(1)])[0].tolist() == [1, 1]  # streams stay
    other.create(2, np.ones(1))
    other.close()
    second.close()
    server.close()
    responder.close()
    assert sorted(plain.values) == [1, 2]


def test_a_door_that_nobody_attends_is_given_up(monkeypatch):
    monkeypatch.setattr(_door, "PATIENCE", 0.05)
    here, there = socket.socketpair()
    door, opened = Door(here), []
    with pytest.raises(OSError) as caught:
        while len(opened) < 5000:
            opened.append(door.another())
    # Linux allows so many descriptors on their way as a process may have open.
    assert isinstance(caught.value, TimeoutError) or caught.value.errno in (
        errno.ETOOMANYREFS,
        errno.EMFILE,
    )
    for each in (*opened, there):
        each.close()
    door.close()


def test_connections_of_a_peer_that_nobody_has_are_closed():
    with served(ServerAnswers(PlainServer())) as dial:
        streams = []

        def dialled():
            streams.append(dial())
            return streams[-1]

        server = RemoteServer(Peer("Server", dialled, js.ParameterServerLost))
        server.versions([])
        assert not streams[0].is_closed
        del server
        gc.collect()
        assert streams[0].is_closed


CIRCLE: list = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize("fields", [{1, 2}, CIRCLE, object()], ids=type)
def test_an_answer_that_cannot_be_sent_is_an_error_of_that_request_only(fields):
    def answer(request, stream):
        return WireFrame(Kind.DONE, fields if request.kind == 64 else None)

    with served(answer) as dial:
        peer = Peer("Server", dial_of([dial()]), js.ParameterServerLost)
        with pytest.raises(TypeError):
            peer.ask(WireFrame(64))
        with pytest.raises(TypeError):
            peer.ask(WireFrame(65, fields))
        assert peer.ask(WireFrame(65)).kind == Kind.DONE
        peer.close()


def test_behind_a_closed_door_all_is_lost():
    here, there = socket.socketpair()
    there.close()
    door = Door(here)
    server = RemoteServer(Peer("Server 7", door.dial, js.ParameterServerLost))
    with pytest.raises(js.ParameterServerLost, match="Server 7 is lost: it cannot be"):
        server.versions([1])
    door.close()


def test_nothing_is_left_of_connections_that_broke():
    threads = Started()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for _ in range(3):
            server, there = silent(patience=0.05)
            with pytest.raises(js.ParameterServerLost):
                server.versions([1])
            there.close()
            del server, there
    until(lambda: not threads())
