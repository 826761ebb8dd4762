"""Parameter servers of this process and of another one, against NumPy."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.updates import exported
from hypothesis import given, settings, strategies as st

import jaxstrategy as js
from jaxstrategy._src.parameter_servers.protocol import (
    CallNumber,
    Read,
    ServerOperation,
)

SHAPE = (300, 40)
ONES = np.ones(SHAPE, np.float32)
ROW = np.ones((1, 2), np.float32)
WHOLE = {"set": lambda a, b: b, "add": np.add, "subtract": np.subtract}
ROWS = [f"scatter_{word}" for word in "add sub mul div min max update".split()]
numbers = itertools.count(10**6)


@pytest.fixture(scope="module")
def here():
    return js.coordinator.Threads(1, 1).servers[0]


@pytest.fixture(scope="module")
def elsewhere():
    backend = js.coordinator.LocalProcesses(1, 1)
    yield backend.servers[0]
    backend.close()


@pytest.fixture(params=["here", "elsewhere"])
def server(request):
    return request.getfixturevalue(request.param)


class Stored:
    """One variable, and short names for what is asked of its server."""

    def __init__(self, server, value, is_table=False):
        self.server, self.number = server, next(numbers)
        server.create(self.number, value, is_table)

    def push(self, name, *operands, call=None, program="", others=()):
        variables = (self.number, *(each.number for each in others))
        operation = ServerOperation(name, variables, operands, program)
        return self.server.push([operation], call)

    def operation(self, name, *operands):
        return ServerOperation(name, (self.number,), operands)

    def read(self, rows=None):
        return self.server.read([Read(self.number, rows)])[0]

    @property
    def version(self):
        return self.server.versions([self.number])[0]


def rows_changed(name, table, rows, values):
    """A plain loop; quotients are by the product of what is given for a row."""
    new, divisors = table.copy(), {}
    change = {
        "scatter_add": lambda a, b: a + b,
        "scatter_sub": lambda a, b: a - b,
        "scatter_mul": lambda a, b: a * b,
        "scatter_min": np.minimum,
        "scatter_max": np.maximum,
        "scatter_update": lambda a, b: b,
    }
    for row, value in zip(rows, values, strict=True):
        if name == "scatter_div":
            divisors[row] = divisors.get(row, np.ones_like(value)) * value
        else:
            new[row] = change[name](new[row], value)
    for row, divisor in divisors.items():
        if "int" in table.dtype.name:
            new[row] = table[row].astype(np.int64) // divisor.astype(np.int64)
        else:
            new[row] = table[row] / divisor
    return new


def small(shape, dtype, seed):
    """Numbers that each dtype holds, and their sums and products too."""
    return np.random.default_rng(seed).integers(1, 3, shape).astype(dtype)


def assert_same(found, wanted, message=None):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, message
    found, wanted = found.astype(complex), wanted.astype(complex)
    np.testing.assert_array_equal(found, wanted, err_msg=str(message))


DTYPES = "float32 bfloat16 float8_e4m3fn float64 int4 uint8 int32 int64 bool complex64"


@pytest.mark.slow
def test_operations_of_all_dtypes_are_numpys(server):
    for dtype, is_table in itertools.product(DTYPES.split(), (False, True)):
        dtype = jnp.dtype(dtype)
        for name in WHOLE:
            if name == "subtract" and dtype.kind == "b":
                continue
            if is_table and dtype.name not in ("float32", "int4", "bool"):
                continue  # each is compiled
            for shape in [(3, 2)] if is_table else [(3, 2), (0, 2), ()]:
                old, operand = small(shape, dtype, 1), small(shape, dtype, 2)
                stored = Stored(server, old, is_table)
                assert stored.push(name, operand)
                wanted = np.array(WHOLE[name](old, operand))
                operand[...] = 0  # what was pushed is the server's own
                assert_same(stored.read(), wanted, (name, dtype, is_table))
    for dtype, name in itertools.product(("bfloat16", "int32"), ROWS):
        table, rows = small((5, 2), dtype, 1), np.array([4, 0, 4, 2], np.int64)
        values = small((4, 2), dtype, 2)
        stored = Stored(server, table, is_table=True)
        assert stored.push(name, rows, values) and stored.version == 1
        wanted = rows_changed(name, table, rows, values)
        assert_same(stored.read(), wanted, (name, dtype))
        assert_same(stored.read(rows), wanted[rows], (name, dtype))
    for table, rows in [
        (np.arange(1, 7, dtype=np.float32), [5, 0, 5]),
        (np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4), [1]),
        (np.zeros((0, 2), np.float32), []),
    ]:
        for name in ("scatter_add", "scatter_div", "scatter_update"):
            values = np.full((len(rows), *table.shape[1:]), 2, np.float32)
            stored = Stored(server, table)
            stored.push(name, np.array(rows, np.uint8), values)
            wanted = rows_changed(name, table, rows, values)
            assert_same(stored.read(), wanted, (name, table.shape))


# What is wrong is said, and changes nothing.


def test_wrong_pushes_and_reads_change_nothing(server):
    scalar = Stored(server, np.zeros((), np.int32))
    table = Stored(server, np.zeros((3, 2), np.float32), is_table=True)
    flags = Stored(server, np.zeros(2, bool))
    empty = Stored(server, np.zeros((0, 2), np.float32))
    own = [scalar, table, flags, empty]
    named = rf"variable {table.number}, float32\[3,2\]"
    row = np.array([0])
    wrong = [
        (table, ("scatter_add", row + 3, ROW), IndexError, rf"Row 3 is .*{named}"),
        (empty, ("scatter_add", row, ROW), IndexError, r"Row 0 is not in \[0, 0\)"),
        (
            table,
            ("scatter_add", np.array([0, 1]), ROW),
            ValueError,
            rf"'scatter_add' of {named}, takes float32\[2,2\], not float32\[1,2\]",
        ),
        (
            table,
            ("scatter_add", row, ROW.astype(np.float64)),
            TypeError,
            r"takes float32\[1,2\], not float64\[1,2\]",
        ),
        (table, ("scatter_add", row * 1.0, ROW), TypeError, "whole numbers, not float"),
        (table, ("scatter_add", row[0], ROW), ValueError, r"a vector, not int64\[\]"),
        (
            scalar,
            ("scatter_add", row, row),
            ValueError,
            r"a scalar, int32\[\], of no r",
        ),
        (table, ("set", np.zeros((3, 2), np.int32)), TypeError, r"not int32\[3,2\]"),
        (table, ("mul", ROW), ValueError, "no operation 'mul'; there are set, add"),
        (table, ("add",), ValueError, "one variable and has 1 operands, not 1 and 0"),
        (flags, ("subtract", np.ones(2, bool)), TypeError, "bool, which has no 'subt"),
    ]
    good = table.operation("add", np.ones((3, 2), np.float32))
    for stored, (name, *operands), error, text in wrong:
        operation = stored.operation(name, *operands)
        with pytest.raises(error, match=text):
            server.push([good, operation, good])
    gone = ServerOperation("add", (8,), (ROW,))
    with pytest.raises(LookupError, match="no variable 8 on this server: it was never"):
        server.push([good, gone])
    for read, error, text in [
        (Read(table.number, np.array([0, 3])), IndexError, rf"Row 3 is .*{named}"),
        (Read(9), LookupError, "no variable 9 on this server"),
    ]:
        with pytest.raises(error, match=text):
            server.read([Read(scalar.number), read])
    with pytest.raises(LookupError, match="no variable 5 on this server"):
        server.versions([table.number, 5])
    assert not any(each.read().any() for each in own)
    assert [each.version for each in own] == [0, 0, 0, 0]


def test_values_that_no_variable_can_hold(here, elsewhere):
    for dtype in ("U1", "O", np.longdouble, ">f4", "m8[s]", "V8", [("a", np.int32)]):
        with pytest.raises(TypeError, match="Variable 7 cannot hold .* JAX has no arr"):
            here.create(7, np.zeros(2, dtype))
    with pytest.raises(TypeError, match="array of dtype object came"):
        elsewhere.create(7, np.zeros(2, "O"))
    with pytest.raises(ValueError, match=r"Variable 7 is a scalar, float32\[\]"):
        here.create(7, np.zeros((), np.float32), is_table=True)
    many = np.broadcast_to(np.zeros(1, np.int8), (2**31,))
    with pytest.raises(ValueError, match="has 2147483648 rows. Only 2.*31 - 1"):
        here.create(7, many, is_table=True)


# Memory.


@pytest.mark.parametrize("is_table", [False, True], ids=["host", "device"])
def test_what_nobody_holds_is_changed_in_place(here, is_table):
    stored = Stored(here, ONES, is_table)

    def address():
        return stored.read().ctypes.data

    first, second = stored.read(), stored.read()
    assert first.ctypes.data == second.ctypes.data and first.ctypes.data % 64 == 0
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 2
    del second
    stored.push("add", ONES)
    after = address()
    assert after != first.ctypes.data
    for _ in range(3):
        stored.push("add", ONES)
    assert address() == after and (stored.read() == 5).all()
    table = Stored(here, ONES, is_table=True)
    here.define("more", exported(lambda a, x: a + x, *[(SHAPE, np.float32)] * 2))
    before = table.read().ctypes.data
    for name in ROWS:
        table.push(name, np.array([1, 3, 1]), 2 * ONES[:3])
    table.push("update", ONES, program="more")
    assert table.read().ctypes.data == before


@functools.cache
def twice():
    return exported(lambda a: a * 2, ((4, 2), np.float32))


ANY = st.tuples(
    st.sampled_from(["add", "subtract", "set", "scatter_add", "update", "read"]),
    st.integers(0, 3),
)


@settings(max_examples=40, deadline=None)
@given(is_table=st.booleans(), steps=st.lists(ANY, max_size=20))
def test_any_operations_leave_what_was_read(here, is_table, steps):
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    stored, ones, kept = Stored(here, value, is_table), np.ones((4, 2), np.float32), []
    here.define("twice", twice())
    for name, number in steps:
        match name:
            case "read":  # some of them are held for a while
                kept = [
                    *kept[-number:],
                    (stored.read()[number:], value[number:].copy()),
                ]
            case "scatter_add":
                stored.push(name, np.array([number]), ROW)
                value[number] += 1
            case "update":
                stored.push(name, program="twice")
                value *= 2
            case _:
                stored.push(name, ones * number)
                value = np.array(WHOLE[name](value, ones * number))
        for part, copy in kept:
            np.testing.assert_array_equal(part, copy)
        np.testing.assert_array_equal(stored.read(), value)


# Once for each function.


def counted(server):
    stored, one = Stored(server, np.zeros((), np.int32)), np.ones((), np.int32)
    return stored, functools.partial(stored.push, "add", one)


def test_a_function_pushes_once_and_a_lost_worker_not_at_all(server):
    stored, add = counted(server)
    first = next(numbers)
    assert add(call=CallNumber(first)) and not add(call=CallNumber(first, worker=3))
    assert add(call=CallNumber(first + 1)) and add() and add()
    with pytest.raises(ValueError, match="takes int32"):
        stored.push("add", np.ones(2, np.int32), call=CallNumber(first + 2))
    assert add(call=CallNumber(first + 2))  # a bad push may be made again
    server.fence(2, 1)
    assert not add(call=CallNumber(first + 3, worker=2, incarnation=0))
    assert add(call=CallNumber(first + 3, worker=2, incarnation=1))
    assert add(call=CallNumber(first + 4, worker=1, incarnation=0))
    server.fence(2, 0)  # an old message does not open it again
    assert not add(call=CallNumber(first + 5, worker=2, incarnation=0))
    assert stored.read() == 7


# Programs that change variables together.


FLOATS = ((3,), np.float32)


def momentum(weights, sums, gradient):
    sums = 0.5 * sums + gradient
    return weights - sums, sums


def test_updates_are_of_all_that_their_variables_hold_and_in_order(server):
    first = Stored(server, np.arange(3, dtype=np.float32))
    second = Stored(server, np.zeros(3, np.float32))
    server.define("momentum", exported(momentum, FLOATS, FLOATS, FLOATS))
    server.define("swap", exported(lambda a, b: (b, a), FLOATS, FLOATS))
    server.define("double", exported(lambda a: a * 2, FLOATS))
    server.define("double", b"not looked at")  # it is known
    gradient, sums, weights = np.full(3, 2, np.float32), np.zeros(3), np.arange(3.0)
    kept = []
    for _ in range(3):
        kept.append((first.read(), weights))
        first.push("update", gradient, program="momentum", others=[second])
        sums = 0.5 * sums + 2
        weights = weights - sums
        assert first.read().tolist() == weights.tolist()
        assert second.read().tolist() == sums.tolist()
    assert all(value.tolist() == wanted.tolist() for value, wanted in kept)
    first.push("set", np.arange(3, dtype=np.float32))
    second.push("update", program="swap", others=[first])
    assert second.read().tolist() == [0, 1, 2]
    ones, both = np.ones(3, np.float32), (second.number,)
    server.push(
        [
            ServerOperation("add", both, (ones,)),
            ServerOperation("update", both, (), "double"),
            ServerOperation("subtract", both, (ones,)),
            ServerOperation("scatter_mul", both, (np.array([2, 2]), 2 * ones[:2])),
            ServerOperation("update", both, (), "double"),
        ]
    )
    assert second.read().tolist() == [2, 6, 40]


def test_a_wrong_update_changes_nothing(server):
    first = Stored(server, np.arange(3, dtype=np.float32))
    second = Stored(server, np.zeros(3, np.float32))
    number = Stored(server, np.full((), 5, np.int32))
    server.define("times", exported(lambda a: a * 2, FLOATS))
    server.define("other", exported(lambda a, b: (b, a), FLOATS, FLOATS))
    server.define("total", exported(lambda a: a.sum(), FLOATS))
    several = ServerOperation("add", (first.number, second.number), (np.ones(3, "f"),))
    with pytest.raises(ValueError, match="1 operands, not 2 and 1"):
        server.push([several])
    for variables, operands, program, error, text in [
        ([], (), "times", ValueError, r"at least one, not \(\)"),
        ([first], (), "none", LookupError, "no update 'none' on this server"),
        (
            [number],
            (),
            "times",
            ValueError,
            r"'times' takes \(float32\[3\]\), not variables \(int32\[\]\) and operands",
        ),
        ([second, second], (), "other", ValueError, "different variables.*not"),
        (
            [first],
            (),
            "total",
            ValueError,
            r"returns \(float32\[\]\), which cannot bec",
        ),
    ]:
        good = ServerOperation("update", (first.number,), (), "times")
        changed = tuple(each.number for each in variables)
        with pytest.raises(error, match=text):
            server.push([good, ServerOperation("update", changed, operands, program)])
    assert first.read().tolist() == [0, 1, 2] and number.read() == 5
    assert [each.version for each in (first, second, number)] == [0, 0, 0]
    with pytest.raises(ValueError, match="'x' is no program in the form of `jax.exp"):
        server.define("x", b"nothing")
    with pytest.raises(ValueError, match="exported for cuda. Parameter servers run on"):
        server.define("x", exported(lambda a: a, FLOATS, platforms=("cuda",)))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    two = jax.sharding.NamedSharding(mesh, jax.P("x"))
    kind = jax.ShapeDtypeStruct((4,), np.float32, sharding=two)
    program = jax.export.export(jax.jit(lambda a: a * 2))(kind).serialize()
    with pytest.raises(ValueError, match="exported for 2 devices"):
        server.define("x", bytes(program))


def test_without_what_reads_programs(here, monkeypatch):
    def missing(_):
        raise ImportError("flatbuffers")

    monkeypatch.setattr(jax.export, "deserialize", missing)
    with pytest.raises(ImportError, match=r"pip install 'jaxstrategy\[coordinator\]'"):
        here.define("y", b"")


# Whoever calls.


def test_whatever_jax_was_told_and_while_a_function_is_traced(here):
    kind = ((4, 2), np.float32)
    here.define("one more", exported(lambda a, x: a + x, kind, kind))
    ones = np.ones(*kind)

    def all_operations(first=1.0):
        table, other = Stored(here, ones, is_table=True), Stored(here, ones)
        table.push("add", ones * first)
        table.push("scatter_add", np.array([1, 1]), ones[:2])
        table.push("scatter_div", np.array([1, 1]), ones[:2])
        other.push("update", ones, program="one more")
        np.testing.assert_array_equal(other.read(), 2 * ones)
        return table.read()

    for choice in (
        contextlib.nullcontext(),
        jax.disable_jit(),
        jax.enable_x64(True),
        jax.transfer_guard("disallow"),
        jax.numpy_dtype_promotion("strict"),
        jax.default_device(jax.devices()[3]),
        jax.checking_leaks(),
        jax.debug_infs(True),
    ):
        with choice:
            assert all_operations()[:, 0].tolist() == [2, 4, 2, 2]
    with jax.debug_nans(True):  # JAX would raise when the memory has been given away
        assert np.isnan(all_operations(np.nan)).all()

    def step(x):
        return x * all_operations()[1, 0]

    assert jax.jit(step)(1.0) == 4 and jax.grad(step)(1.0) == 4
    assert (jax.vmap(step)(jnp.ones(2)) == 4).all()


def test_a_job_whose_jax_has_no_cpu(here, monkeypatch):
    def none(backend):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", none)
    Stored(here, ROW)
    with pytest.raises(RuntimeError, match="on a CPU, which JAX_PLATFORMS=cpu leaves"):
        Stored(here, ROW, is_table=True)
