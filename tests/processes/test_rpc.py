"""Remote calls are as TensorFlow has them, and nothing outlives server and client."""

import contextlib
import gc
import json
import os
import pickle
import socket
import threading
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.sockets import free_address
from helpers.threads import in_threads, until

import jaxstrategy as js
from jaxstrategy._src.processes import messages, secret as _secret

rpc = js.experimental.rpc
INT = jax.ShapeDtypeStruct((), jnp.int32)
FLOAT = jax.ShapeDtypeStruct((), jnp.float32)
gate = threading.Event()


def fail(x):
    raise KeyError("no such thing")


def wait(x):
    assert gate.wait(60)
    return x


@jax.jit
def mul(x, y):
    return x * y


@jax.jit
def nest(x):
    return {"t": (x, [x, x + 1]), "u": (x,)}


@jax.jit
def total(tree):
    return tree["a"] + tree["b"][0]


@jax.jit
def big(x):
    return x.sum(), x + 1


@pytest.fixture(scope="module")
def server():
    server = rpc.Server.create("grpc", "127.0.0.1:0")
    assert server.register("mul", mul, INT, INT) is None
    server.register("nest", nest, 7)
    server.register("total", total, {"a": INT, "b": [1]})
    server.register("nothing", jax.jit(lambda: None))
    server.register("empty", jax.jit(lambda x=3: []))
    server.register("half", jax.jit(lambda x: x / 2), np.float16(1))
    server.register("brain", jax.jit(lambda x: x + 1), jnp.ones(3, jnp.bfloat16))
    server.register("big", big, jax.ShapeDtypeStruct((1 << 20,), jnp.float32))
    callback = jax.jit(lambda x: jax.pure_callback(fail, INT, x))
    server.register("fail", callback, INT)
    slow = jax.jit(lambda x: jax.pure_callback(wait, INT, x))
    server.register("slow", slow, INT)
    with server:
        server.start()
        server.start()
        yield server


@pytest.fixture(scope="module")
def client(server):
    with rpc.Client.create("grpc", server.address, "tests", 60_000) as client:
        yield client


@pytest.fixture
def unstarted():
    with rpc.Server.create("grpc", "127.0.0.1:0") as server:
        yield server


def test_what_makes_no_server_or_client_is_refused(client):
    for maker in rpc.Server, rpc.Client:
        with pytest.raises(ValueError, match="Only GRPC backend is supported at the m"):
            maker.create("http", "127.0.0.1:0")
        for count in 0, -1, 1.5:
            with pytest.raises(ValueError, match=f"`max_message_bytes` was {count}; a"):
                maker.create("grpc", "127.0.0.1:0", max_message_bytes=count)
    for timeout in -1, float("nan"), "1":
        with pytest.raises(ValueError, match="`timeout_in_ms` was .*; a number of mil"):
            rpc.Client.create("grpc", "127.0.0.1:1", timeout_in_ms=timeout)
        with pytest.raises(ValueError, match="`timeout_in_ms` was .*; a number of mil"):
            client.mul(2, 3, timeout_in_ms=timeout)


def test_a_client_waits_for_a_server_as_long_as_it_may(unstarted):
    for address in free_address(), unstarted.address:
        with pytest.raises(rpc.DeadlineExceededError, match="No RPC server ans") as e:
            rpc.Client.create("grpc", address, timeout_in_ms=300)
        assert isinstance(e.value, TimeoutError) and e.value.error_code == 4


class Pair(NamedTuple):
    x: object
    y: object


def test_what_cannot_be_registered_is_refused(unstarted):
    for function, specs, told in [
        (lambda x: x, ["text"], r"f: argument\[0\] is a str. Give arrays, numbers or"),
        (lambda x: x, [np.array("text")], r"f: argument\[0\] is of dtype <U4; arrays"),
        (lambda x: x, [jax.random.key(0)], "and of random keys their `jax.random.key_"),
        (lambda x: x.x, [Pair(1, 2)], r"f: argument\[0\] is a Pair. Other processes"),
        (lambda x: [Pair(x, x)], [1], r"f: result\[0\] is a Pair. Other processes are"),
        (lambda x: jax.random.key(x), [1], "f: result is of dtype key<fry>; arrays of"),
    ]:
        with pytest.raises(ValueError, match=told):
            unstarted.register("f", jax.jit(function), *specs)
    with pytest.raises(ValueError, match=r"Only jitted functions .* register `jax.jit"):
        unstarted.register("f", lambda x: x, INT)
    with pytest.raises(ValueError, match="Input signature not specified for the func"):
        unstarted.register("f", mul)
    with pytest.raises(ValueError, match="`f` is a Compiled: register `jax.jit"):
        unstarted.register("f", mul.lower(INT, INT).compile(), INT, INT)
    unstarted.register("f", mul, INT, INT)  # the name is still free
    unstarted.register("mul", mul, INT, INT)
    for name in "mul", "mul_blocking":
        told = f"^{name} is already registered$"
        with pytest.raises(rpc.InvalidArgumentError, match=told) as caught:
            unstarted.register(name, mul, INT, INT)
        assert caught.value.error_code == 3
    for name in "", "call", "close", "call_blocking", "__len__":
        with pytest.raises(rpc.InvalidArgumentError, match="cannot have the name"):
            unstarted.register(name, mul, INT, INT)
    unstarted.start()
    told = "All methods must be registered before starting"
    with pytest.raises(rpc.FailedPreconditionError, match=told) as caught:
        unstarted.register("mul", mul, INT, INT)
    assert caught.value.error_code == 9
    unstarted.close()
    with pytest.raises(rpc.FailedPreconditionError, match="closed; create another"):
        unstarted.start()


def test_methods_larger_than_the_bound_are_not_registered():
    with rpc.Server.create("grpc", "127.0.0.1:0", max_message_bytes=100) as server:
        with pytest.raises(ValueError, match="`f` have 104 bytes, more than the 100"):
            server.register("f", jax.jit(lambda x: x.sum()), jnp.zeros(26))
        with pytest.raises(ValueError, match="`f` have 104 bytes, more than the 100"):
            server.register("f", jax.jit(lambda: jnp.zeros(26)))
        server.register("f", jax.jit(lambda x: x), jnp.zeros(25))


def test_clients_have_the_methods(client, server):
    result = client.mul(2, 3)
    assert result.is_ok() is True and result.get_error() == (0, "")
    value = result.get_value()
    assert value == 6 and value.dtype == np.int32 and value.shape == ()
    assert client.mul_blocking(2, 3) == 6
    assert "mul" in client.methods and "mul_blocking" in dir(client)
    told = f"RPC Call for mul method to server {server.address}"
    assert client.mul.__doc__ == client.mul_blocking.__doc__ == told
    assert client.mul.__name__ == "mul"
    with pytest.raises(AttributeError, match=r"has no method 'div'; it has 'mul', 'n"):
        client.div  # noqa: B018
    assert client.nest_blocking(2) == {"t": (2, [2, 3]), "u": (2,)}
    assert client.total_blocking({"b": [5], "a": 4}) == 9
    assert client.empty_blocking() == []
    brain = client.brain_blocking(np.ones(3, ml_dtypes.bfloat16))
    assert brain.dtype == ml_dtypes.bfloat16 and brain.tolist() == [2, 2, 2]
    nothing = client.nothing()
    assert nothing.is_ok() and nothing.get_value() is None


def test_a_missing_or_wrong_structure_of_results_is_an_error(client):
    result = client.call("mul", [2, 3])
    assert result.is_ok()
    with pytest.raises(rpc.InvalidArgumentError, match="give `output_specs` to `call`"):
        result.get_value()
    for specs, told in [
        ([INT, INT], "Expects 2 results but 1 are provided"),
        (FLOAT, r"Expects result\[0\] to be float32 but int32 is provided"),
        (
            jnp.zeros(2, int),
            r"Expects result\[0\] to have the shape \(2,\) but \(\) is",
        ),
    ]:
        with pytest.raises(rpc.InvalidArgumentError, match=told):
            client.call("mul", [2, 3], specs).get_value()


def test_wrong_arguments_are_a_status(client):
    for result, told in [
        (client.mul(2.0, 3), "Expects arg[0] to be int32 but float32 is"),
        (client.call("mul", [True, 3], INT), "Expects arg[0] to be int32 but bool is"),
        (client.half(3), "Expects arg[0] to be float16 but int32 is"),
        (
            client.call("mul", [np.array([2, 3]), 3], INT),
            "Expects arg[0] to have the shape () but (2,) is",
        ),
        (client.call("mul", [2], INT), "Expects 2 args but 1 are"),
    ]:
        assert result.is_ok() is False
        assert result.get_error() == (3, f"{told} provided")
        with pytest.raises(rpc.InvalidArgumentError) as caught:
            result.get_value()
        assert str(caught.value) == f"{told} provided"
    assert client.call("nope").get_error() == (3, "nope is not registered.")
    # Numbers take the dtype of their kind, and of 64 bits those of JAX.
    assert client.half_blocking(3.0).dtype == np.float16
    assert client.mul_blocking(np.int64(2), np.array(3)) == 6


def test_wrong_arguments_are_errors_of_the_caller(client):
    large = np.array(1 << 40)
    for args, error, told in [
        (([1],), TypeError, r"`total`\[0\] is a list; a dict was wanted"),
        (({"a": 1, "b": (1,)},), TypeError, r"\['b'\] is a tuple; a list was wanted"),
        (({"a": [1], "b": [1]},), TypeError, r"\['a'\] is a list; an array int32\[\]"),
        (({"a": None, "b": [1]},), TypeError, r"\['a'\] is None; an array int32\[\]"),
        (({"a": 1, "c": [1]},), ValueError, r"keys \['a', 'c'\]; \['a', 'b'\] were"),
        (({"a": 1, "b": [1, 2]},), ValueError, r"\['b'\] has 2 entries; 1 were wanted"),
        ((), ValueError, "The arguments of `total` has 0 entries; 1 were wanted"),
        (({"a": "one", "b": [1]},), TypeError, r"total: arg\[0\] is a str; arrays of"),
        (({"a": 1 << 40, "b": [1]},), OverflowError, "out of bounds|too large"),
        (({"a": large, "b": [1]},), OverflowError, r"numbers that int32 cannot hold"),
    ]:
        with pytest.raises(error, match=told):
            client.total(*args)


def test_an_error_of_the_function_is_a_status(client):
    result = client.fail(2)
    code, told = result.get_error()
    assert not result.is_ok() and code == 3 and "no such thing" in told
    for call in (result.get_value, lambda: client.fail_blocking(2)):
        with pytest.raises(rpc.InvalidArgumentError, match="no such thing") as caught:
            call()
        assert isinstance(str(caught.value), str)
        assert caught.value.message == str(caught.value)


def test_a_slow_method_is_a_status(server, client):
    gate.clear()
    try:
        result = client.slow(2, timeout_in_ms=1)
        assert result.is_ok() is False
        assert result.get_error() == (4, "No answer came within 1 ms.")
        with pytest.raises(rpc.DeadlineExceededError):
            result.get_value()
        with pytest.raises(TimeoutError):
            client.slow_blocking(2, timeout_in_ms=1)
        with rpc.Client.create("grpc", server.address, timeout_in_ms=2000) as hasty:
            hasty._seconds = 0.001  # that of `create` was for coming together
            assert hasty.slow(2).get_error()[0] == 4
            later = hasty.slow(2, timeout_in_ms=60_000)
            gate.set()
            assert later.get_value() == 2
    finally:
        gate.set()


def test_without_a_timeout_a_call_lasts_as_long_as_it_takes(server):
    gate.clear()
    with rpc.Client.create("grpc", server.address) as client:
        result = client.slow(3)
        assert client.mul_blocking(2, 3) == 6  # meanwhile
        gate.set()
        assert result.get_value() == 3


def test_four_mebibytes_are_no_bound(client):
    x = np.arange(1 << 20, dtype=np.float32)  # 4 MiB and a head
    total, more = client.big_blocking(x)
    np.testing.assert_allclose(total, (1 << 19) * ((1 << 20) - 1.0), rtol=1e-5)
    np.testing.assert_array_equal(more, x + 1)


def test_the_bounds_are_configurable():
    with rpc.Server.create("grpc", "127.0.0.1:0", max_message_bytes=4096) as server:
        server.register("add", jax.jit(lambda x: x + 1), jnp.zeros(1024))
        server.start()
        with rpc.Client.create("grpc", server.address) as client:
            assert client.add_blocking(np.zeros(1024)).sum() == 1024
            code, told = client.add(np.zeros(1025)).get_error()
            assert code == 8 and "have 4100 bytes, and the server takes 4096" in told
            with pytest.raises(rpc.ResourceExhaustedError):
                client.add_blocking(np.zeros(1025))
        bound = {"max_message_bytes": 4095}
        with rpc.Client.create("grpc", server.address, **bound) as client:
            code, told = client.add(np.zeros(1024)).get_error()
            assert code == 8 and "have 4096 bytes, and this client takes 4095" in told


def test_methods_with_variables_run_one_after_the_other():
    count = js.Variable(0.0)
    add = jax.jit(lambda x: [count.assign_add(x)][1:])
    with rpc.Server.create("grpc", "127.0.0.1:0") as server:
        server.register("add", add, FLOAT)
        server.register("one", jax.jit(lambda: [count.assign_add(1.0)][1:]))
        server.start()

        def ask():
            with rpc.Client.create("grpc", server.address) as client:
                for _ in range(25):
                    client.add_blocking(1.0)
                    client.one_blocking()

        in_threads(*[ask] * 6)
    assert count.value() == 300


def test_arguments_by_name_are_a_structure_too(client):
    specs = jax.ShapeDtypeStruct((), jnp.int32)
    assert client.call("total", [{"a": 4, "b": [5]}], specs).get_value() == 9
    assert client.call("mul", {"x": 4, "y": 5}, specs).get_value() == 20
    with pytest.raises(ValueError, match="output_specs is a str. Give arrays, numbers"):
        client.call("mul", [4, 5], "int32")


def started(address="127.0.0.1:0", **methods):
    server = rpc.Server.create("grpc", address)
    server.register("mul", jax.jit(lambda x, y: x * y), INT, INT)
    for name, function in methods.items():
        server.register(name, function, INT)
    server.start()
    return server


def connected(server, timeout=60_000):
    return rpc.Client.create("grpc", server.address, timeout_in_ms=timeout)


def slow():
    gate.clear()
    return jax.jit(lambda x: jax.pure_callback(wait, INT, x))


def nobody_listens(address):
    host, _, port = address.rpartition(":")
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 60).close()
        return False
    return True


def test_both_end_with_their_last_reference():
    server = started()
    client, address = connected(server), server.address
    call = client.mul
    assert call(2, 3).get_value() == 6
    gone = weakref.ref(client), weakref.ref(server)
    holder = [server, client]
    holder.append(holder)  # in a cycle
    del holder
    del client, call, server
    gc.collect()
    until(lambda: not any(each() for each in gone))
    until(lambda: nobody_listens(address))


def test_calls_end_when_the_client_is_closed():
    with started(slow=slow()) as server:
        client = connected(server)
        result = client.slow(5)
        client.close(), client.close()
        code, told = result.get_error()
        assert code == 14 and told == "The client was closed."
        with pytest.raises(ConnectionError, match="The client was closed"):
            client.mul_blocking(2, 3)
        gate.set()
    server.close()
    until(lambda: nobody_listens(server.address))


@pytest.mark.slow
def test_a_client_finds_a_server_that_was_started_again():
    server = started(slow=slow())
    address = server.address
    with connected(server) as client:
        assert client.mul_blocking(2, 3) == 6
        under_way = client.slow(1)
        gate.set()
        assert under_way.get_value() == 1
        server.close()
        lost = f"The RPC server at {address} is lost: "
        until(lambda: client.mul(2, 3).get_error()[0] == 14)
        with pytest.raises(rpc.UnavailableError, match=lost):
            client.mul_blocking(2, 3)  # nobody listens
        with started(address):
            assert client.mul_blocking(2, 3) == 6


SECRETS = ("a secret of these tests", "another secret, not that")
VARIABLE = "JAXSTRATEGY_CLUSTER_SECRET"


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
        with pytest.raises(rpc.UnauthenticatedError, match="this one, which has none"):
            connected(server)
        # Who proves nothing is told nothing, and others do not notice.
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), 60) as stranger:
            stranger.sendall(b"GET /mul HTTP/1.1\r\n\r\n" + os.urandom(4096))
            data = b""
            with contextlib.suppress(ConnectionResetError):
                while more := stranger.recv(1 << 16):
                    data += more
        assert b"mul" not in data
        monkeypatch.setenv(VARIABLE, SECRETS[0])
        with connected(server) as client:
            assert client.mul_blocking(2, 3) == 6


def test_strangers_are_neither_let_in_nor_called(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("JAXSTRATEGY_TRUST_NETWORK", raising=False)
    for address in "192.0.2.1:1234", "0.0.0.0:0":
        with pytest.raises(js.ClusterError, match="no secret|every address"):
            rpc.Server.create("grpc", address)
    with pytest.raises(rpc.UnauthenticatedError, match="the job has no secret"):
        rpc.Client.create("grpc", "192.0.2.1:1234", timeout_in_ms=500)


def test_an_address_has_a_port(tmp_path):
    for address in str(tmp_path / "rpc"), "localhost", "localhost:":
        for maker in rpc.Server, rpc.Client:
            with pytest.raises(ValueError, match="`address` was .*; `host:port` was"):
                maker.create("grpc", address)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


def test_other_messages_of_the_job_are_errors_and_nothing_is_unpickled():
    blob = pickle.dumps(Bomb())
    deep = b"[" * 5000 + b"]" * 5000
    with started() as server:
        client = messages.Client(server.address, _secret.Secret.of_environment())
        for frames, told in [
            ([b'[["mul"], []]'], "['mul'] is not registered."),
            ([b'["__class__", []]'], "__class__ is not registered."),
            ([b'["mul", []]'], "Expects 2 args but 0 are provided"),
            ([blob], "An RPC server was sent no call: "),
            ([deep], "An RPC server was sent no call: "),
            ([b'["mul", [["object", []]]]', blob], "has arrays of dtype object"),
            ([b'["mul", [["int32", [1000000000000]]]]', b"x"], "was sent no call: "),
        ]:
            answer = client.request(*frames, timeout_seconds=60)
            assert told in json.loads(bytes(answer[0]))[0]["message"], told
        client.close()
        with connected(server) as client:
            assert client.mul_blocking(2, 3) == 6


LEAF = {"dtype": "int32", "shape": []}


@contextlib.contextmanager
def answering(*answers):
    """A server of the job that answers something else, and its address."""

    def answer(request):
        listing = json.loads(bytes(request.frames[0]))[0] is None
        request.reply(*answers[0 if listing else 1])

    secret = _secret.Secret.of_environment()
    server = messages.Server(secret, answer, address="127.0.0.1:0")
    yield server.address
    server.close()


def test_answers_that_are_none_are_errors():
    object_leaf = {"dtype": "object", "shape": []}
    lists = [
        None,
        {"largest": 1, "methods": [["mul"]]},
        {"largest": 1, "methods": [["mul", LEAF, object_leaf]]},
        {"largest": 1, "methods": [["mul", LEAF, ["dict", [[["x"], None]]]]]},
        {"largest": 1, "methods": [["mul", LEAF, json.loads("[" * 500 + "]" * 500)]]},
    ]
    texts = [json.dumps([listed, []]).encode() for listed in lists]
    for text in [*texts, pickle.dumps(Bomb())]:
        with answering([text]) as address:
            with pytest.raises(rpc.InternalError, match="lists no methods"):
                rpc.Client.create("grpc", address, timeout_in_ms=60_000)
    listed = {"largest": 100, "methods": [["get", ["tuple", []], LEAF]]}
    with answering([json.dumps([listed, []]).encode()], [b"[null, []]"]) as address:
        with rpc.Client.create("grpc", address) as client:
            with pytest.raises(rpc.InternalError, match="something else than its out"):
                client.get().get_value()
