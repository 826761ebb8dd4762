"""Parameter servers of this process and of another one, against NumPy."""

import contextlib
import functools
import gc
import itertools
import threading
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.threads import in_threads

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
        server.create(self.number, value)
        self.seen = 0
        if is_table:  # what rows of change stays with JAX
            self.push("scatter_update", np.zeros(0, np.int32), value[:0])
            self.seen = 1

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
        return self.server.versions([self.number])[0] - self.seen


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


def exported(function, *types):
    """`function` of arrays of these shapes and dtypes, as servers are sent it."""
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    program = jax.export.export(jax.jit(function), platforms=["cpu"])(*structs)
    return bytes(program.serialize())


DTYPES = "float32 bfloat16 float8_e4m3fn float64 int4 uint8 int32 int64 bool complex64"


@pytest.mark.slow
def test_operations_of_all_dtypes_are_numpys(here):
    server = here
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


def test_wrong_pushes_and_reads_change_nothing(server):
    scalar = Stored(server, np.zeros((), np.int32))
    table = Stored(server, np.zeros((3, 2), np.float32), is_table=True)
    empty = Stored(server, np.zeros((0, 2), np.float32))
    long = Stored(server, np.zeros((300, 2), np.float32), is_table=True)
    own = [scalar, table, empty, long]
    named = rf"variable {table.number}, float32\[3,2\]"
    row = np.array([0])
    wrong = [
        (table, ("scatter_add", row + 3, ROW), IndexError, rf"Row 3 is .*{named}"),
        (table, ("scatter_sub", row - 1, ROW), IndexError, r"Row -1 is not in \[0, 3"),
        (empty, ("scatter_add", row, ROW), IndexError, r"Row 0 is not in \[0, 0\)"),
        # -1 is 255 without its sign, which is a row of this one.
        (
            long,
            ("scatter_add", np.int8([3, -1]), np.zeros((2, 2), np.float32)),
            IndexError,
            r"Row -1 is not in \[0, 300",
        ),
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
        (table, ("scatter_add", row * 1.0, ROW), TypeError, "a vector of whole numb"),
        (table, ("scatter_add", row == 0, ROW), TypeError, r"named by bool\[1\]"),
        (table, ("scatter_add", row[0], ROW), TypeError, r"by int64\[\]; a vector"),
        (scalar, ("scatter_add", row, row), TypeError, r"int32\[\], were named by"),
        (table, ("add", ROW), ValueError, r"takes float32\[3,2\], not float32\[1,2\]"),
        (table, ("set", np.zeros((3, 2), np.int32)), TypeError, r"not int32\[3,2\]"),
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
        (Read(table.number, row - 1), IndexError, r"Row -1 is not in \[0, 3\)"),
        (Read(long.number, np.int8([-1])), IndexError, r"Row -1 is not in \[0, 300\)"),
        (Read(scalar.number, row), TypeError, "a vector of whole numbers"),
        (Read(table.number, row * 1.0), TypeError, r"named by float64\[1\]"),
        (Read(9), LookupError, "no variable 9 on this server"),
    ]:
        with pytest.raises(error, match=text):
            server.read([Read(scalar.number), read])
    with pytest.raises(LookupError, match="no variable 5 on this server"):
        server.versions([table.number, 5])
    assert not any(each.read().any() for each in own)
    assert [each.version for each in own] == [0, 0, 0, 0]


def test_what_a_server_cannot_do_is_told(here, monkeypatch):
    many = np.broadcast_to(np.zeros((1, 0), np.int8), (2**31, 0))
    stored = Stored(here, many)
    with pytest.raises(ValueError, match="has 2147483648 rows. Only 2.*31 - 1"):
        stored.read(np.array([3]))

    def missing(_):
        raise ImportError("flatbuffers")

    monkeypatch.setattr(jax.export, "deserialize", missing)
    with pytest.raises(ImportError, match=r"pip install 'jaxstrategy\[coordinator\]'"):
        here.define("y", b"")

    def none(backend):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", none)
    Stored(here, ROW)
    with pytest.raises(RuntimeError, match="on a CPU, which JAX_PLATFORMS=cpu leaves"):
        Stored(here, ROW, is_table=True)


def test_numbers_are_used_once_until_they_are_dropped(server):
    stored = Stored(server, ROW)
    with pytest.raises(ValueError, match="is on this server already") as caught:
        server.create(stored.number, np.ones(2, np.float32))
    notes = getattr(caught.value, "__notes__", [])
    assert all("Traceback of Parameter server 0" in note for note in notes)
    server.drop([stored.number, stored.number, 77])
    with pytest.raises(LookupError):
        stored.read()
    server.create(stored.number, np.ones(2, np.float32))
    assert stored.read().tolist() == [1, 1] and stored.version == 0


VIEWS = {
    "all": lambda value: value,
    "rows": lambda value: value[7:9],
    "view of views": lambda value: np.asarray(value[1:])[3].view(np.uint32),
    "memoryview": memoryview,
    "transposed": lambda value: value.T.reshape(-1, 40)[:5],
    "dlpack": np.from_dlpack,
    "jax": jax.device_put,
}


def test_what_somebody_holds_stays(server):
    for is_table, (name, held) in itertools.product((False, True), VIEWS.items()):
        first = np.arange(12000, dtype=np.float32).reshape(SHAPE)
        stored = Stored(server, first, is_table)
        part = held(stored.read())
        copy = np.array(part, copy=True)
        for each in ("add", "subtract", "set", "add"):
            stored.push(each, ONES)
            np.testing.assert_array_equal(np.asarray(part), copy, err_msg=name)
        rows = stored.read(np.array([3, 3, 299]))
        stored.push("scatter_add", np.arange(300), ONES)
        np.testing.assert_array_equal(np.asarray(part), copy, err_msg=name)
        assert (stored.read() == 3).all() and (rows == 2).all()


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


def test_dropped_variables_leave_no_memory(here):
    gc.collect()
    others = jax.live_arrays()
    stored = Stored(here, ONES, is_table=True)
    stored.push("add", ONES)
    here.drop([stored.number])
    gc.collect()
    left = [a for a in jax.live_arrays() if not any(a is each for each in others)]
    assert not [a for a in left if a.shape == SHAPE]


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


def test_functions_behind_one_that_stalls_are_remembered_in_little_memory():
    stored, add = counted(js.coordinator.Threads(1, 1).servers[0])
    first = 10**7  # it does not end
    add(call=CallNumber(first + 20_000, first))
    tracemalloc.start()
    for number in range(1, 10_000):
        assert add(call=CallNumber(first + number, first))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 100_000 and stored.read() == 10_000
    assert not add(call=CallNumber(first + 5000, first))
    assert add(call=CallNumber(first + 10_000, first)) and add(call=CallNumber(first))
    # Of those that all have ended, nothing is known any more.
    assert not add(call=CallNumber(first + 15_000, first + 20_000))


def test_a_retry_waits_for_what_is_being_pushed(here):
    """And so does a fence."""
    stored, _ = counted(here)
    go_on, inside, results = threading.Event(), threading.Event(), []

    class Slow(np.ndarray):
        """Is looked at for long."""

        def __array_ufunc__(self, ufunc, method, *inputs, **options):
            inside.set()
            assert go_on.wait(60)
            plain = [np.asarray(each) for each in inputs]
            return getattr(ufunc, method)(*plain, **options)

    one, call = np.ones((), np.int32), CallNumber(next(numbers) + 10**6, worker=40)
    operand = one.view(Slow)

    def pushing(operand, worker):
        results.append(stored.push("add", operand, call=call._replace(worker=worker)))

    threads = [
        threading.Thread(target=pushing, args=(operand, 40)),
        threading.Thread(target=pushing, args=(one, 50)),
        threading.Thread(target=here.fence, args=(40, 1)),
    ]
    threads[0].start()
    assert inside.wait(60)
    for thread in threads[1:]:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
    assert not results
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [False, True] and stored.read() == 1


def test_counts_of_threads_are_exact_and_no_read_is_torn(server):
    dense = Stored(server, np.zeros((500, 40), np.float32))
    table = Stored(server, np.zeros((10, 3), np.float32), is_table=True)
    add = dense.operation("add", np.ones((500, 40), np.float32))
    scatter = np.array([1, 1, 4]), np.ones((3, 3), np.float32)
    scatter = table.operation("scatter_add", *scatter)
    kept = []

    def pushing(worker):
        for _ in range(40):
            server.push([add, scatter])

    def reading():
        for _ in range(40):
            value, first = dense.read(), None
            first = value[0, 0]
            assert (value == first).all()
            kept.append((value[::100], first))
            rows = dense.read(np.array([0, 250, 499]))
            assert (rows == rows[0, 0]).all()

    in_threads(*[lambda n=n: pushing(n) for n in range(3)], reading, reading)
    assert all((value == first).all() for value, first in kept)
    assert (dense.read() == 120).all() and (dense.version, table.version) == (120, 120)
    wanted = np.zeros((10, 3))
    wanted[[1, 4]] = [[240] * 3, [120] * 3]
    np.testing.assert_array_equal(table.read(), wanted)


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
    ones = np.ones(3, np.float32)
    for variables, operands, program, error, text in [
        ([first], (), "none", LookupError, "no update 'none' on this server"),
        ([number], (), "times", ValueError, r"'times' takes \(float32\[3\]\), not var"),
        ([first, second], (), "times", ValueError, r"'times' takes \(float32\[3\]\)"),
        ([first], (), "total", ValueError, r"returns \(float32\[\]\), which cannot be"),
        ([first], (ones,), "other", ValueError, "'other' returns"),
    ]:
        good = ServerOperation("update", (first.number,), (), "times")
        changed = tuple(each.number for each in variables)
        with pytest.raises(error, match=text):
            server.push([good, ServerOperation("update", changed, operands, program)])
    assert first.read().tolist() == [0, 1, 2] and number.read() == 5
    assert [each.version for each in (first, second, number)] == [0, 0, 0]
    with pytest.raises(ValueError, match="'x' is no program in the form of `jax.exp"):
        server.define("x", b"nothing")


def test_updates_of_several_variables_do_not_wait_for_each_other(here):
    own = [Stored(here, np.zeros(4, np.float32)) for _ in range(3)]
    kind = ((4,), np.float32)
    here.define("move", exported(lambda a, b, x: (a - x, b + x), kind, kind, kind))
    ones = np.ones(4, np.float32)

    def moving(a, b):
        for _ in range(50):
            own[a].push("update", ones, program="move", others=[own[b]])

    in_threads(*[lambda v=v: moving(*v) for v in ((0, 1), (1, 0), (1, 2), (2, 0))])
    # (0, 1) and (1, 0) cancel; then 50 go from 1 to 2, and 50 from 2 to 0.
    assert [float(each.read()[0]) for each in own] == [50, -50, 0]


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
