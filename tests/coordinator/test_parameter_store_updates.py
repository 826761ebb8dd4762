"""Updates of variables by programs on a parameter server."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.updates import exported

from jaxstrategy.parameter_servers._operations import Read, ServerOperation
from jaxstrategy.parameter_servers.store._store import Store

FLOATS = ((3,), np.float32)


def update(program, variables, *operands):
    return ServerOperation("update", variables, tuple(operands), program)


def store(**programs):
    """Two vectors, 0 and 1, and a number, 2."""
    found = Store()
    found.create(0, np.arange(3, dtype=np.float32))
    found.create(1, np.zeros(3, np.float32))
    found.create(2, np.full((), 5, np.int32))
    for key, program in programs.items():
        found.define(key, program)
    return found


def values(found, *numbers):
    return [value.tolist() for value in found.read([Read(n) for n in numbers])]


def momentum(weights, sums, gradient):
    sums = 0.5 * sums + gradient
    return weights - sums, sums


def test_an_update_is_of_all_that_its_variables_hold():
    found = store(momentum=exported(momentum, FLOATS, FLOATS, FLOATS))
    gradient = np.full(3, 2, np.float32)
    weights, sums = np.arange(3.0), np.zeros(3)
    for _ in range(3):
        found.push([update("momentum", (0, 1), gradient)])
        sums = 0.5 * sums + 2
        weights = weights - sums
        assert values(found, 0, 1) == [weights.tolist(), sums.tolist()]
    assert found.versions([0, 1, 2]) == [3, 3, 0]


def test_the_order_of_the_variables_is_the_programs():
    found = store(swap=exported(lambda a, b: (b, a), FLOATS, FLOATS))
    found.push([update("swap", (1, 0))])
    assert values(found, 0, 1) == [[0, 0, 0], [0, 1, 2]]
    found.push([update("swap", (0, 1)), update("swap", (0, 1))])
    assert values(found, 0, 1) == [[0, 0, 0], [0, 1, 2]]


def test_updates_and_other_operations_are_in_their_order():
    found = store(double=exported(lambda a: a * 2, FLOATS))
    ones = np.ones(3, np.float32)
    rows = np.array([2, 2])
    found.push(
        [
            ServerOperation("add", (0,), (ones,)),
            update("double", (0,)),
            ServerOperation("subtract", (0,), (ones,)),
            ServerOperation("scatter_mul", (0,), (rows, np.full(2, 2, np.float32))),
            update("double", (0,)),
            ServerOperation("set", (1,), (ones,)),
        ]
    )
    assert values(found, 0, 1) == [[2, 6, 40], [1, 1, 1]]


def test_random_keys_are_their_numbers():
    def drawn(key, total):
        key, own = jax.random.split(jax.random.wrap_key_data(key))
        return jax.random.key_data(key), total + jax.random.uniform(own)

    kinds = ((2,), np.uint32), ((), np.float32)
    found = store(drawn=exported(drawn, *kinds))
    key = jax.random.key(7)
    found.create(10, np.asarray(jax.random.key_data(key)))
    found.create(11, np.zeros((), np.float32))
    total = np.float32(0)
    for _ in range(2):
        found.push([update("drawn", (10, 11))])
        key, own = jax.random.split(key)
        total += np.float32(jax.random.uniform(own))
    data, sums = found.read([Read(10), Read(11)])
    np.testing.assert_array_equal(data, jax.random.key_data(key))
    assert sums == total


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "float64", "bool", "complex64"])
def test_updates_of_any_dtype(dtype):
    dtype = jnp.dtype(dtype)
    with jax.enable_x64(True):
        program = exported(lambda a, x: jnp.where(a == x, a, x), *[((2,), dtype)] * 2)
    found = store(where=program)
    found.create(10, np.array([0, 1]).astype(dtype))
    found.push([update("where", (10,), np.array([1, 1]).astype(dtype))])
    (value,) = found.read([Read(10)])
    assert value.dtype == dtype and (value == np.array([1, 1]).astype(dtype)).all()


def test_an_operand_that_becomes_the_value_is_copied():
    found = store(take=exported(lambda a, x: x, FLOATS, FLOATS))
    operand = np.ones(3, np.float32)
    found.push([update("take", (0,), operand)])
    operand[:] = 9
    assert values(found, 0) == [[1, 1, 1]]


def test_what_was_read_stays_through_updates():
    found = store(momentum=exported(momentum, FLOATS, FLOATS, FLOATS))
    kept = []
    for turn in range(4):
        weights, sums = found.read([Read(0), Read(1)])
        if turn % 2:
            kept.append((weights[1:], weights[1:].copy()))
            kept.append((sums, sums.copy()))
        del weights, sums
        found.push([update("momentum", (0, 1), np.ones(3, np.float32))])
    for value, copy in kept:
        np.testing.assert_array_equal(value, copy)


@pytest.mark.parametrize(
    ("operation", "error", "text"),
    [
        (update("none", (0,)), LookupError, "no update 'none' on this server"),
        (update("double", (7,)), LookupError, "no variable 7 on this server"),
        (
            update("double", (2,)),
            ValueError,
            r"'double' takes \(float32\[3\]\), not variables \(int32\[\]\) and "
            r"operands \(\)",
        ),
        (update("double", (0, 1)), ValueError, r"'double' takes \(float32\[3\]\)"),
        (update("double", ()), ValueError, r"at least one, not \(\)"),
        (update("swap", (1, 1)), ValueError, r"different variables.*not \(1, 1\)"),
        (
            update("sum", (0,)),
            ValueError,
            r"'sum' returns \(float32\[\]\), which cannot become what the variables "
            r"hold: \(float32\[3\]\)",
        ),
        (update("swap", (0,), np.ones(3, np.float32)), ValueError, "'swap' returns"),
    ],
)
def test_a_wrong_update_changes_nothing(operation, error, text):
    found = store(
        double=exported(lambda a: a * 2, FLOATS),
        swap=exported(lambda a, b: (b, a), FLOATS, FLOATS),
        sum=exported(lambda a: a.sum(), FLOATS),
    )
    with pytest.raises(error, match=text):
        found.push([update("double", (0,)), operation])
    assert values(found, 0, 1, 2) == [[0, 1, 2], [0, 0, 0], 5]
    assert found.versions([0, 1, 2]) == [0, 0, 0]


def test_what_is_no_program_for_one_cpu_is_refused():
    found = Store()
    with pytest.raises(ValueError, match="'x' is no program in the form of `jax.exp"):
        found.define("x", b"nothing")
    cuda = exported(lambda a: a, FLOATS, platforms=("cuda",))
    with pytest.raises(ValueError, match="exported for cuda. Parameter servers run on"):
        found.define("x", cuda)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    two = jax.sharding.NamedSharding(mesh, jax.P("x"))
    kind = jax.ShapeDtypeStruct((4,), np.float32, sharding=two)
    program = jax.export.export(jax.jit(lambda a: a * 2))(kind).serialize()
    with pytest.raises(ValueError, match="exported for 2 devices"):
        found.define("x", bytes(program))


def test_a_program_that_is_known_is_not_read_again():
    found = store(double=exported(lambda a: a * 2, FLOATS))
    found.define("double", b"not looked at")
    found.push([update("double", (0,))])
    assert values(found, 0) == [[0, 2, 4]]


def test_without_what_reads_programs(monkeypatch):
    def missing(_):
        raise ImportError("flatbuffers")

    monkeypatch.setattr(jax.export, "deserialize", missing)
    with pytest.raises(ImportError, match=r"pip install 'jaxstrategy\[coordinator\]'"):
        Store().define("x", b"")
