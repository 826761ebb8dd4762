"""Memory of a parameter server: what was read stays, what nobody holds is changed."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.updates import exported
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxstrategy.parameter_servers._aligned_memory import aligned, aligned_empty
from jaxstrategy.parameter_servers._operations import OF_ROWS, Read, ServerOperation
from jaxstrategy.parameter_servers.store._store import Store

SHAPE = (300, 40)
ONES = np.ones(SHAPE, np.float32)
ON_HOST_AND_DEVICE = pytest.mark.parametrize(
    "is_table", [False, True], ids=["host", "device"]
)


def operation(name, *operands, variables=(0,), program=""):
    return ServerOperation(name, variables, tuple(operands), program)


ADD = operation("add", ONES)


def store(value, is_table=False):
    found = Store()
    found.create(0, value, is_table)
    return found


def read(found, rows=None):
    (value,) = found.read([Read(0, rows)])
    return value


def address(found):
    return read(found).ctypes.data


@ON_HOST_AND_DEVICE
def test_reads_share_the_memory_until_the_next_change(is_table):
    found = store(ONES, is_table)
    first, second = read(found), read(found)
    assert first.ctypes.data == second.ctypes.data
    assert first.ctypes.data % 64 == 0
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 2


@ON_HOST_AND_DEVICE
def test_what_nobody_holds_is_changed_in_place(is_table):
    found = store(ONES, is_table)
    before = address(found)
    for _ in range(3):
        found.push([ADD])
    assert address(found) == before
    assert (read(found) == 4).all()


@ON_HOST_AND_DEVICE
@pytest.mark.parametrize(
    "held",
    [
        lambda value: value,
        lambda value: value[7:9],
        lambda value: np.asarray(value[1:])[3].view(np.uint32),
        lambda value: memoryview(value),
        lambda value: value.T.reshape(-1, 40)[:5],
        lambda value: np.from_dlpack(value),
    ],
    ids=["all", "rows", "view-of-views", "memoryview", "transposed", "dlpack"],
)
def test_what_somebody_holds_stays(is_table, held):
    found = store(np.arange(12000, dtype=np.float32).reshape(SHAPE), is_table)
    part = held(read(found))
    copy = np.array(part, copy=True)
    for name in ("add", "subtract", "set", "add"):
        found.push([operation(name, ONES)])
        np.testing.assert_array_equal(np.asarray(part), copy)
    found.push([operation("scatter_add", np.arange(300), ONES)])
    np.testing.assert_array_equal(np.asarray(part), copy)
    assert (read(found) == 3).all()


@ON_HOST_AND_DEVICE
def test_what_jax_was_given_stays(is_table):
    found = store(ONES, is_table)
    device = jax.device_put(read(found))
    found.push([ADD])
    found.push([ADD])
    assert (device == 1).all() and (read(found) == 3).all()


@ON_HOST_AND_DEVICE
def test_what_a_running_program_was_given_stays(is_table):
    found = store(ONES, is_table)

    @jax.jit
    def late(value):
        zero = jnp.full((200, 200), 1e-30)
        zero = jax.lax.fori_loop(0, 60, lambda _, x: jnp.sin(x @ x), zero)
        return value + zero.sum() * 0

    late(read(found))
    for turn in range(1, 20):
        result = late(read(found))
        found.push([ADD])
        found.push([ADD])
        assert (result == 2 * turn - 1).all()


@ON_HOST_AND_DEVICE
def test_a_copy_is_made_once_for_a_held_value(is_table):
    found = store(ONES, is_table)
    held = read(found)
    found.push([ADD])
    after = address(found)
    assert after != held.ctypes.data
    found.push([ADD])
    assert address(found) == after


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,)], ids=str)
def test_reads_of_any_kind_stay(dtype, shape):
    dtype = jnp.dtype(dtype)
    found = store(np.ones(shape, dtype))
    kept = read(found)
    found.push([operation("set", np.zeros(shape, dtype))])
    assert kept.dtype == dtype and kept.shape == shape
    assert (kept == 1).all() and (read(found) == 0).all()


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_table_is_changed_in_place(name):
    found = store(ONES, is_table=True)
    before = address(found)
    found.push([operation(name, np.array([1, 3, 1]), 2 * ONES[:3])])
    assert address(found) == before


def test_an_update_is_in_place():
    kind = (SHAPE, np.float32)
    found = store(ONES, is_table=True)
    found.define("add", exported(lambda a, x: a + x, kind, kind))
    before = address(found)
    found.push([operation("update", ONES, program="add")])
    assert address(found) == before
    held = read(found)
    found.push([operation("update", ONES, program="add")])
    assert (held == 2).all() and (read(found) == 3).all()


@ON_HOST_AND_DEVICE
@pytest.mark.parametrize("name", ["set", "add", "scatter_update", "scatter_add"])
def test_operands_are_not_kept(is_table, name):
    found = store(np.zeros(SHAPE, np.float32), is_table)
    values = aligned_empty(SHAPE, np.float32)
    values[:] = 1
    rows = np.arange(300, dtype=np.int32)
    operands = (rows, values) if name.startswith("scatter") else (values,)
    for operand in operands:
        operand.flags.writeable = False
    found.push([operation(name, *operands)])
    for operand in operands:
        operand.flags.writeable = True
        operand[:] = 7
    assert (read(found) == 1).all()


@ON_HOST_AND_DEVICE
def test_the_first_value_is_copied(is_table):
    value = aligned(ONES.copy())
    found = store(value, is_table)
    value[:] = 5
    assert (read(found) == 1).all()
    found.push([ADD])
    assert (value == 5).all()


def test_rows_are_a_copy():
    for is_table in (False, True):
        found = store(ONES, is_table)
        rows = read(found, np.array([3, 3, 299]))
        found.push([ADD])
        assert rows.shape == (3, 40) and (rows == 1).all()


@ON_HOST_AND_DEVICE
def test_dropped_variables_leave_no_memory(is_table):
    gc.collect()
    others = jax.live_arrays()
    found = store(ONES, is_table)
    held = read(found)
    found.drop([0, 5])
    with pytest.raises(LookupError, match="no variable 0 on this server"):
        found.read([Read(0)])
    assert (held == 1).all()
    del held
    gc.collect()
    left = [a for a in jax.live_arrays() if not any(a is each for each in others)]
    assert not [a for a in left if a.shape == SHAPE]


def test_dropping_needs_no_lock_that_a_finalizer_could_wait_for():
    found = store(ONES)
    with found._variables[0].lock:
        found.drop([0])


def test_aligned_arrays():
    for shape in ((), (3,), (2, 5), (0, 4)):
        array = aligned_empty(shape, jnp.bfloat16)
        assert array.shape == shape and array.dtype == jnp.bfloat16
        assert array.flags.writeable and array.flags.c_contiguous
        assert not array.size or array.ctypes.data % 64 == 0
        assert not array.size or aligned(array) is array
    odd = aligned_empty((4, 5), np.int8)[:, 1:]
    odd[:] = np.arange(16).reshape(4, 4)
    copy = aligned(odd)
    np.testing.assert_array_equal(copy, odd)
    assert copy.ctypes.data % 64 == 0 and copy.flags.c_contiguous


@functools.cache
def twice():
    return exported(lambda a: a * 2, ((4, 2), np.float32))


ANY = st.tuples(
    st.sampled_from(["add", "subtract", "set", "scatter_add", "update", "read"]),
    st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(is_table=st.booleans(), steps=st.lists(ANY, max_size=20))
def test_any_operations_leave_what_was_read(is_table, steps):
    value, row = (
        np.arange(8, dtype=np.float32).reshape(4, 2),
        np.ones((1, 2), np.float32),
    )
    found, ones = store(value, is_table), np.ones((4, 2), np.float32)
    found.define("twice", twice())
    kept = []
    for name, number in steps:
        match name:
            case "read":  # some of them are held for a while
                kept = [*kept[-number:], (read(found)[number:], value[number:].copy())]
            case "scatter_add":
                found.push([operation(name, np.array([number]), row)])
                value[number] += 1
            case "update":
                found.push([operation(name, program="twice")])
                value *= 2
            case _:
                found.push([operation(name, ones * number)])
                value = {"add": value + number, "subtract": value - number}.get(
                    name, ones * number
                )
        for part, copy in kept:
            np.testing.assert_array_equal(part, copy)
        np.testing.assert_array_equal(read(found), value)
