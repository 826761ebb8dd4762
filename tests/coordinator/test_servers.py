"""Variables on parameter servers of this process and of another one, against NumPy."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.updates import exported
from hypothesis import HealthCheck, given, settings, strategies as st

import jaxstrategy as js
from jaxstrategy._src.parameter_servers.protocol import (
    CallNumber,
    Read,
    ServerOperation,
)

numbers = itertools.count(10**6)


@pytest.fixture(scope="module", params=["here", "elsewhere"])
def strategy(request):
    kind = js.coordinator.Threads
    if request.param == "elsewhere":
        kind = js.coordinator.LocalProcesses
    strategy = js.ParameterServerStrategy(backend=kind(1, 1))
    yield strategy
    strategy.close()


@pytest.fixture
def server(strategy):
    return strategy.backend.servers[0]


def variable(strategy, value):
    with strategy.scope():
        return js.Variable(value)


def small(shape, dtype, seed):
    """Numbers that each dtype holds, and their sums and products too."""
    return np.random.default_rng(seed).integers(1, 3, shape).astype(dtype)


def assert_same(found, wanted, message=None):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, message
    found, wanted = found.astype(complex), wanted.astype(complex)
    np.testing.assert_array_equal(found, wanted, err_msg=str(message))


def test_operations_of_all_dtypes_are_numpys(strategy):
    for name in ("float32", "bfloat16", "float8_e4m3fn", "int4", "uint8", "bool"):
        old, operand = (small((3, 2), jnp.dtype(name), seed) for seed in (1, 2))
        v = variable(strategy, old)
        assert_same(v.numpy(), old, name)
        v.assign(operand)
        assert_same(v.numpy(), operand, name)
        v.assign_add(old)
        assert_same(v.numpy(), np.add(operand, old), name)
        if name != "bool":
            v.assign_sub(old)
            assert_same(v.numpy(), operand, name)
    rows, ids = np.array([4, 0, 4, 2]), [4, 0, 2]
    for name, word in itertools.product(("bfloat16", "int32"), ROW_CHANGES):
        table, values = (small((n, 2), jnp.dtype(name), n) for n in (5, 4))
        v = variable(strategy, table)
        getattr(v, f"scatter_{word}")(js.IndexedSlices(values, rows))
        wanted = table.copy()
        for row in ids:
            for value in values[rows == row]:
                wanted[row] = ROW_CHANGES[word](wanted[row], value)
        assert_same(v.numpy(), wanted.astype(table.dtype), (name, word))
        assert_same(np.asarray(v.sparse_read(rows)), wanted[rows], (name, word))


ROW_CHANGES = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "update": lambda a, b: b,
}
ANY = st.tuples(
    st.sampled_from(["add", "subtract", "set", "scatter_add", "update", "read"]),
    st.integers(0, 3),
)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(ANY, max_size=20))
def test_any_operations_leave_what_was_read(strategy, steps):
    value, kept = np.arange(8, dtype=np.float32).reshape(4, 2), []
    v, ones = variable(strategy, value), np.ones((4, 2), np.float32)
    value = value.copy()
    for name, number in steps:
        match name:
            case "read":  # some of them are held for a while
                part = v.numpy()[number:]
                kept = [*kept[-number:], (part, value[number:].copy())]
            case "scatter_add":
                v.scatter_add(js.IndexedSlices(ones[:1], np.array([number])))
                value[number] += 1
            case "update":
                v.update(lambda old: old * 2)
                value *= 2
            case "set":
                v.assign(ones * number)
                value = ones * number
            case _:
                change = {"add": v.assign_add, "subtract": v.assign_sub}[name]
                change(ones * number)
                value += number if name == "add" else -number
        for part, copy in kept:
            np.testing.assert_array_equal(part, copy)
        np.testing.assert_array_equal(v.numpy(), value)


def test_whatever_jax_was_told(strategy):
    ones = np.ones((4, 2), np.float32)
    for choice in (
        contextlib.nullcontext(),
        jax.disable_jit(),
        jax.numpy_dtype_promotion("strict"),
        jax.default_device(jax.devices()[3]),
        jax.checking_leaks(),
        jax.debug_infs(True),
    ):
        table = variable(strategy, ones)
        with choice:
            table.assign_add(ones)
            table.scatter_add(js.IndexedSlices(ones[:2], np.array([1, 1])))
            assert table.numpy()[:, 0].tolist() == [2, 4, 2, 2]


# What no public method asks of a server.


@pytest.fixture
def stored(server):
    """The number of a variable, and how to add to it."""
    number = next(numbers)
    server.create(number, np.zeros((3, 2), np.float32), True)
    add = ServerOperation("add", (number,), (np.ones((3, 2), np.float32),))
    return number, lambda call: server.push([add], call)


def test_a_function_pushes_once_and_a_lost_worker_not_at_all(server, stored):
    (number, add), first = stored, next(numbers)
    assert add(CallNumber(first)) and not add(CallNumber(first, worker=3))
    assert add(CallNumber(first + 1)) and add(None) and add(None)
    server.fence(2, 1)
    assert not add(CallNumber(first + 3, worker=2, incarnation=0))
    assert add(CallNumber(first + 3, worker=2, incarnation=1))
    assert add(CallNumber(first + 4, worker=1, incarnation=0))
    server.fence(2, 0)  # an old message does not open it again
    assert not add(CallNumber(first + 5, worker=2, incarnation=0))
    assert (server.read([Read(number, None)])[0] == 6).all()


def test_what_nobody_holds_is_changed_in_place():
    server, ones = js.coordinator.Threads(1, 1).servers[0], np.ones((300, 40), "f")
    for is_table, number in ((False, 1), (True, 2)):
        server.create(number, ones, is_table)
        first = server.read([Read(number, None)])[0]
        places = {first.ctypes.data}
        for _ in range(4):
            server.push([ServerOperation("add", (number,), (ones,))], None)
            places.add(server.read([Read(number, None)])[0].ctypes.data)
        assert len(places) == 2 and (first == 1).all()  # which somebody holds


def test_what_is_wrong_changes_nothing(server, stored):
    number, _ = stored
    kind = ((3, 2), np.float32)
    server.define("times", exported(lambda a: a * 2, kind))
    server.define("total", exported(lambda a: a.sum(), kind))
    row, rows = np.array([0]), np.ones((1, 2), np.float32)
    for name, own, operands, error, text in [
        ("scatter_add", [number], (row + 3, rows), IndexError, "Row 3 is .*float32"),
        ("scatter_add", [number], (row * 1.0, rows), TypeError, "whole numbers, not"),
        ("scatter_add", [number], (row[0], rows), ValueError, "a vector, not int64"),
        ("scatter_add", [number], (row, rows[0]), ValueError, r"takes float32\[1,2\]"),
        ("set", [number], (rows.astype(int),), TypeError, "takes float32.*not int64"),
        ("mul", [number], (rows,), ValueError, "no operation 'mul'; there are set, a"),
        ("add", [number], (), ValueError, "one variable and has 1 operands, not 1 an"),
        ("add", [8], (rows,), LookupError, "no variable 8 on this server: it was nev"),
        ("none", [number], None, LookupError, "no update 'none' on this server"),
        ("times", [], None, ValueError, r"at least one, not \(\)"),
        ("times", [number] * 2, None, ValueError, "different variables.*not"),
        ("total", [number], None, ValueError, r"returns \(float32\[\]\), which cannot"),
    ]:
        operation = ServerOperation(name, tuple(own), operands)
        if operands is None:
            operation = ServerOperation("update", tuple(own), (), name)
        good = ServerOperation("update", (number,), (), "times")
        with pytest.raises(error, match=text):
            server.push([good, operation, good])
    assert not server.read([Read(number, None)])[0].any()
    assert server.versions([number]) == [0]
    with pytest.raises(ValueError, match="'x' is no program in the form of `jax.exp"):
        server.define("x", b"nothing")
    with pytest.raises(ValueError, match="exported for cuda. Parameter servers run on"):
        server.define("x", exported(lambda a: a, kind, platforms=("cuda",)))
    two = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x"))
    divided = jax.ShapeDtypeStruct((4,), np.float32, sharding=two)
    program = jax.export.export(jax.jit(lambda a: a * 2))(divided).serialize()
    with pytest.raises(ValueError, match="exported for 2 devices"):
        server.define("x", bytes(program))


def test_what_servers_need_of_jax(monkeypatch):
    server = js.coordinator.Threads(1, 1).servers[0]
    for dtype in ("U1", "O", np.longdouble, ">f4", "m8[s]"):
        with pytest.raises(TypeError, match="Variable 7 cannot hold .* JAX has no arr"):
            server.create(7, np.zeros(2, dtype))
    with pytest.raises(ValueError, match=r"Variable 7 is a scalar, float32\[\]"):
        server.create(7, np.zeros((), np.float32), True)
    many = np.broadcast_to(np.zeros(1, np.int8), (2**31,))
    with pytest.raises(ValueError, match="has 2147483648 rows. Only 2.*31 - 1"):
        server.create(7, many, True)

    def missing(_):
        raise ImportError("flatbuffers")

    def none(backend):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax.export, "deserialize", missing)
    with pytest.raises(ImportError, match=r"pip install 'jaxstrategy\[coordinator\]'"):
        server.define("y", b"")
    monkeypatch.setattr(jax, "local_devices", none)
    with pytest.raises(RuntimeError, match="on a CPU, which JAX_PLATFORMS=cpu leaves"):
        server.create(7, np.ones((1, 2)), True)
