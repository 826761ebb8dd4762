"""A store behind the wire does what NumPy does, and refuses what it refuses here."""

import gc

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.peers import remote
from jax import export

from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation
from jaxstrategy.parameter_servers.store._store import Store
from jaxstrategy.parameter_servers.wire import _receive_buffers


@pytest.fixture
def server():
    with remote(Store()) as found:
        yield found


def operation(name, *operands, variables=(0,), program=""):
    return ServerOperation(name, variables, operands, program)


@pytest.mark.parametrize("shape", [(), (3,), (200, 300)])
@pytest.mark.parametrize("dtype", ["float32", "int32", ml_dtypes.bfloat16])
def test_random_pushes_are_numpys(server, dtype, shape):
    random = np.random.default_rng(1)

    def some():
        return random.integers(-8, 8, shape).astype(dtype)

    expected = some()
    server.create(0, expected)
    for turn in range(8):
        change = some()
        name = random.choice(["set", "add", "subtract"])
        match name:
            case "set":
                expected = change.copy()
            case "add":
                expected = np.asarray(expected + change)
            case "subtract":
                expected = np.asarray(expected - change)
        assert server.push([operation(str(name), change)], CallNumber(turn))
        change[...] = 77  # what was pushed is the server's own
        (found,) = server.read([Read(0)])
        np.testing.assert_array_equal(found, expected, strict=True)


def test_rows_of_a_table_are_numpys(server):
    random = np.random.default_rng(2)
    expected = random.normal(size=(50, 8)).astype(np.float32)
    server.create(0, expected, is_table=True)
    for _ in range(5):
        rows = random.integers(0, 50, 30)
        values = random.normal(size=(30, 8)).astype(np.float32)
        server.push([operation("scatter_add", rows, values)])
        np.add.at(expected, rows, values)
        (found,) = server.read([Read(0, rows[:7])])
        np.testing.assert_allclose(found, expected[rows[:7]], rtol=1e-5)
    np.testing.assert_allclose(server.read([Read(0)])[0], expected, rtol=1e-5)


def test_an_update_runs_its_program(server):
    types = [jax.ShapeDtypeStruct((3,), np.float32)] * 3
    step = jax.jit(lambda value, count, change: (value - change, count + 1))
    server.define(
        "step", bytes(export.export(step, platforms=["cpu"])(*types).serialize())
    )
    server.create(0, np.ones(3, np.float32))
    server.create(1, np.zeros(3, np.float32))
    change = np.arange(3, dtype=np.float32)
    server.push([operation("update", change, variables=(0, 1), program="step")])
    value, count = server.read([Read(0), Read(1)])
    np.testing.assert_array_equal(value, [1, 0, -1])
    np.testing.assert_array_equal(count, [1, 1, 1])


WRONG = {
    "shape": lambda s: s.push([operation("add", np.zeros(2, np.float32))]),
    "dtype": lambda s: s.push([operation("add", np.zeros(3, np.int32))]),
    "variable": lambda s: s.read([Read(9)]),
    "program": lambda s: s.push([operation("update", program="none")]),
    "operation": lambda s: s.push([operation("multiply", np.zeros(3, np.float32))]),
    "rows": lambda s: s.read([Read(1, np.array([4]))]),
    "negative row": lambda s: s.read([Read(1, np.array([-1]))]),
    "twice": lambda s: s.create(0, np.zeros(1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_of_a_store_in_this_process(server, name):
    here, caught = Store(), []
    for each in (here, server):
        each.create(0, np.zeros(3, np.float32))
        each.create(1, np.zeros((4, 2), np.float32), is_table=True)
        with pytest.raises(Exception) as error:  # noqa: B017  # whatever it is here
            WRONG[name](each)
        caught.append(error.value)
    assert type(caught[0]) is type(caught[1])
    assert str(caught[0]) == str(caught[1])


def test_what_was_read_stays_while_the_variable_changes(server):
    server.create(0, np.zeros(40_000, np.float32))
    kept = []
    for turn in range(6):
        kept += server.read([Read(0)])
        server.push([operation("add", np.ones(40_000, np.float32))])
        assert all((each == k).all() for k, each in enumerate(kept)), turn


def test_pulls_and_pushes_use_memory_again(server):
    server.create(0, np.zeros(100_000, np.float32))
    gc.collect()
    idle = None
    for turn in range(12):
        (value,) = server.read([Read(0)])
        server.push([operation("add", value + 1)])
        del value
        if turn == 4:
            idle = _receive_buffers.SHARED.idle_bytes
    assert idle and _receive_buffers.SHARED.idle_bytes <= idle + 500_000
