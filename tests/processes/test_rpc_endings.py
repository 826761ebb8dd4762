"""Strangers get no answer of an RPC server, and nothing outlives server and client."""

import gc
import json
import pickle
import socket
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.threads import Started, until

import jaxstrategy as js
from jaxstrategy.parameter_servers.wire._listener import Listener, dialled
from jaxstrategy.parameter_servers.wire._peer import done
from jaxstrategy.parameter_servers.wire._stream import (
    HEAD,
    FrameError,
    Kind,
    Stream,
    WireFrame,
)
from jaxstrategy.processes._secret import NETWORK, VARIABLE, Secret

rpc = js.experimental.rpc
INT = jax.ShapeDtypeStruct((), jnp.int32)
SECRETS = ("a secret of these tests", "another secret, not that")


@pytest.fixture(autouse=True)
def threads():
    found = Started("jaxstrategy")
    yield found
    gc.collect()
    until(lambda: not found())


def started(address="127.0.0.1:0", **methods):
    server = rpc.Server.create("grpc", address)
    server.register("mul", jax.jit(lambda x, y: x * y), INT, INT)
    for name, function in methods.items():
        server.register(name, function, INT)
    server.start()
    return server


def connected(server, timeout=60_000):
    return rpc.Client.create("grpc", server.address, timeout_in_ms=timeout)


def stream_to(server):
    return dialled(server.address, Secret.of_environment())


def called(server):
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), 60)


# Ends.


def test_closing_ends_threads_and_sockets(threads):
    server = started()
    client = connected(server)
    assert client.mul_blocking(2, 3) == 6 and threads()
    client.close()
    server.close()
    assert not threads()
    client.close()
    server.close()
    with pytest.raises(OSError):
        called(server)


@pytest.mark.parametrize("is_cycle", [False, True], ids=["alone", "in a cycle"])
def test_both_end_with_their_last_reference(is_cycle, threads):
    server = started()
    client = connected(server)
    mul = client.mul
    assert mul(2, 3).get_value() == 6
    gone = weakref.ref(client), weakref.ref(server)
    if is_cycle:
        holder = [server, client]
        holder.append(holder)
        del holder
    del client, mul, server
    gc.collect()
    until(lambda: not any(each() for each in gone))
    until(lambda: not threads())


def test_a_result_keeps_the_client_until_it_has_come():
    gate = threading.Event()

    def wait(x):
        assert gate.wait(60)
        return x

    slow = jax.jit(lambda x: jax.pure_callback(wait, INT, x))
    with started(slow=slow) as server:
        result = connected(server).slow(5)
        gc.collect()
        gate.set()
        assert result.get_value() == 5


def test_calls_end_when_the_client_is_closed():
    gate = threading.Event()

    def wait(x):
        assert gate.wait(60)
        return x

    slow = jax.jit(lambda x: jax.pure_callback(wait, INT, x))
    with started(slow=slow) as server:
        client = connected(server)
        result = client.slow(5)
        client.close()
        code, told = result.get_error()
        assert code == 14 and "lost: the client was closed" in told
        with pytest.raises(ConnectionError, match="The client was closed"):
            client.mul_blocking(2, 3)
        gate.set()


def test_a_client_finds_a_server_that_was_started_again():
    server = started()
    address = server.address
    with connected(server) as client:
        assert client.mul_blocking(2, 3) == 6
        server.close()
        with pytest.raises(
            rpc.UnavailableError, match=f"The RPC server at {address} is l"
        ):
            client.mul_blocking(2, 3)
        assert client.mul(2, 3).get_error()[0] == 14  # nobody listens
        with started(address):
            assert client.mul_blocking(2, 3) == 6


def test_nothing_hinders_the_end_of_a_process():
    code = """
import jax, jax.numpy as jnp
import jaxstrategy as js
rpc = js.experimental.rpc
server = rpc.Server.create("grpc", "127.0.0.1:0")
server.register("double", jax.jit(lambda x: 2 * x), 1)
server.start()
client = rpc.Client.create("grpc", server.address)
print(client.double_blocking(4))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "8\n", "")


# Strangers.


def test_who_has_another_secret_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, SECRETS[0])
    with started() as server:
        with connected(server) as client:
            assert client.mul_blocking(2, 3) == 6
        monkeypatch.setenv(VARIABLE, SECRETS[1])
        with pytest.raises(js.ClusterError, match=f"another {VARIABLE}") as caught:
            connected(server)
        assert isinstance(caught.value, rpc.UnauthenticatedError)
        assert caught.value.error_code == 16
        monkeypatch.delenv(VARIABLE)
        with pytest.raises(
            rpc.UnauthenticatedError, match="than this one, which has n"
        ):
            connected(server)


@pytest.mark.parametrize("address", ["192.0.2.1:1234", "0.0.0.0:0"])
def test_strangers_cannot_be_let_in(monkeypatch, address):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(NETWORK, raising=False)
    with pytest.raises(js.ClusterError, match="no secret|every address"):
        rpc.Server.create("grpc", address)


def test_clients_do_not_call_strangers(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(NETWORK, raising=False)
    with pytest.raises(rpc.UnauthenticatedError, match="the job has no secret"):
        rpc.Client.create("grpc", "192.0.2.1:1234", timeout_in_ms=500)


def test_who_proves_nothing_is_told_nothing(monkeypatch):
    monkeypatch.setenv(VARIABLE, SECRETS[0])
    frame = HEAD.pack(0xA7, Kind.METHODS, 0, 0, 0, 0, 0, 0)
    with started() as server, called(server) as sock:
        sock.sendall(frame * 20)
        data = b""
        while more := sock.recv(1 << 16):
            data += more
        assert b"mul" not in data
        with connected(server) as client:  # others do not notice
            assert client.mul_blocking(2, 3) == 6


def test_a_unix_socket_is_an_address(tmp_path):
    tmp_path.chmod(0o700)
    path = tmp_path / "rpc"
    with started(str(path)) as server, connected(server) as client:
        assert client.mul_blocking(2, 3) == 6
    assert not path.exists()


# Hostile frames, of somebody who has passed the handshake.


def hung_up(stream):
    stream.limit_silence(60)
    try:
        stream.receive()
    except (EOFError, ConnectionError):
        return True
    return False


@pytest.mark.parametrize(
    "lengths",
    [(0, 0, (1 << 20) + 1, 0, 0), (0, 0, 0, 1 << 30, 0), (1, 10, 0, 0, 1 << 40)],
    ids=["fields", "blob", "arrays"],
)
def test_what_is_announced_too_large_is_not_read(lengths):
    with started() as server, connected(server) as client:
        stream = stream_to(server)
        arrays, types, fields, blob, contents = lengths
        head = HEAD.pack(0xA7, Kind.INVOKE, 0, arrays, types, fields, blob, contents)
        stream._sock.sendall(head)
        assert hung_up(stream)
        stream.close()
        assert client.mul_blocking(2, 3) == 6


@pytest.mark.parametrize(
    "frame, told",
    [
        (WireFrame(Kind.INVOKE, ["mul"]), "['mul'] is not registered."),
        (WireFrame(Kind.INVOKE, None), "None is not registered."),
        (WireFrame(Kind.INVOKE, "__class__"), "__class__ is not registered."),
        (WireFrame(Kind.INVOKE, "mul"), "Expects 2 args but 0 are provided"),
        (
            WireFrame(Kind.CALL, "mul"),
            f"An RPC server was sent a request {Kind.CALL:d}.",
        ),
        (
            WireFrame(Kind.DEFINE, 0, b"x"),
            f"An RPC server was sent a request {Kind.DEFINE:d}.",
        ),
    ],
)
def test_other_requests_are_errors(frame, told):
    with started() as server:
        stream = stream_to(server)
        stream.send(frame)
        answer = stream.receive()
        stream.close()
    assert answer.kind == Kind.DONE and answer.fields["message"] == told


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


def test_nothing_is_unpickled(monkeypatch):
    monkeypatch.setenv(VARIABLE, SECRETS[0])  # with which workers would
    blob = pickle.dumps(Bomb())
    with started() as server:
        stream = stream_to(server)
        stream.send(WireFrame(Kind.INVOKE, "mul", blob, [np.int32(2), np.int32(3)]))
        assert stream.receive().arrays[0] == 6
        stream.close()
    told = {"type": "ValueError", "message": "as text", "args": ["as text"]}
    with answering(lambda request: WireFrame(Kind.FAILED, told, blob)) as address:
        with pytest.raises(rpc.InternalError, match="lists no methods: as text"):
            rpc.Client.create("grpc", address)


class answering:  # noqa: N801
    """A server that answers what a function makes of the requests."""

    def __init__(self, answer):
        self.answer = answer

    def __enter__(self):
        self.listener = Listener("127.0.0.1:0", Secret.of_environment())
        self.listener.start(self.serve)
        return self.listener.address

    def serve(self, stream):
        try:
            while True:
                request = stream.receive()
                if request.kind != Kind.PATIENCE:
                    stream.send(self.answer(request))
        except (EOFError, OSError):
            stream.close()

    def __exit__(self, *_):
        self.listener.close()


LEAF = {"dtype": "int32", "shape": []}


@pytest.mark.parametrize(
    "listed",
    [
        None,
        {"methods": []},
        {"largest": 1, "methods": [["mul"]]},
        {"largest": 1, "methods": [["mul", LEAF, {"dtype": "object", "shape": []}]]},
        {"largest": 1, "methods": [["mul", LEAF, ["set", []]]]},
        {"largest": 1, "methods": [["mul", LEAF, ["dict", [[["x"], None]]]]]},
        {"largest": 1, "methods": [["mul", LEAF, json.loads("[" * 500 + "]" * 500)]]},
    ],
)
def test_a_list_that_is_none_is_an_error(listed):
    with answering(lambda request: done(listed)) as address:
        with pytest.raises(rpc.InternalError, match="lists no methods"):
            rpc.Client.create("grpc", address, timeout_in_ms=60_000)


@pytest.mark.parametrize(
    "answer, code",
    [
        (done(None), 13),
        (done({"code": "0", "message": ""}), 13),
        (done({"code": 77, "message": "what"}), 77),
        (done({"code": 0, "message": ""}, [np.zeros(3)]), 0),
    ],
)
def test_other_answers_are_errors(answer, code):
    listed = {"largest": 100, "methods": [["get", ["tuple", []], LEAF]]}

    def answered(request):
        return done(listed) if request.kind == Kind.METHODS else answer

    with answering(answered) as address:
        with rpc.Client.create("grpc", address) as client:
            result = client.get()
            assert result.get_error()[0] == code
            with pytest.raises(rpc.RpcError):
                result.get_value()


def test_streams_refuse_what_they_are_told_to():
    left, right = socket.socketpair()
    here, there = Stream(left), Stream(right)
    there.limit_received(head=100, whole=1000)
    here.send(WireFrame(64, None, b"", [np.zeros(50, np.uint8)]))
    assert there.receive().arrays[0].size == 50
    here.send(WireFrame(64, "x" * 101))
    with pytest.raises(FrameError, match="a message of 103 bytes was announced"):
        there.receive()
    here.close()
    there.close()
