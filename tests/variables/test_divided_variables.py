"""Variables of which each replica keeps a part, outside of steps."""

import copy
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.variables.initial_value import Start

WHOLE = np.arange(32.0, dtype=np.float32).reshape(8, 4)


def sharded(count=4, shard="state", **options):
    chosen = js.StateSharding(shard, **{"min_bytes": 0, **options})
    return js.MirroredStrategy(jax.devices()[:count], sharding=chosen)


@pytest.fixture(scope="module")
def plain():
    return js.MirroredStrategy(jax.devices()[:4])


def made(strategy, value=WHOLE, **options):
    with strategy.scope():
        return js.Variable(value, **{"name": "w", **options})


def lies_at(variable):
    """The dimension along which the variable's own array is divided."""
    array = variable.cell.array
    parts = array.sharding.shard_shape(array.shape)
    found = [i for i, n in enumerate(array.shape) if parts[i] < n]
    return found[0] if found else None


# Where it lies.


WHERE = [
    (WHOLE, None, 0),
    (WHOLE[:, :3], None, 0),
    (WHOLE[:3], None, 1),
    (WHOLE[:3, :3], None, None),
    (1.5, None, None),
    (WHOLE, "whole", None),
    (WHOLE, 1, 1),
    (WHOLE, -1, 1),
    (WHOLE, np.int64(1), 1),
    (WHOLE, js.StateSharding(min_bytes=1000), None),
    (WHOLE, js.StateSharding("optimizer", min_bytes=100), 0),
    (WHOLE[:0], 0, None),
]


def test_it_lies_as_its_strategy_or_it_says(plain):
    for value, sharding, dimension in WHERE:
        variable = made(sharded(), value, sharding=sharding)
        assert lies_at(variable) == dimension == variable.division.dimension
        assert isinstance(variable, js.Sharded) == (dimension is not None)
        assert isinstance(variable, js.Mirrored) == (dimension is None)
        np.testing.assert_array_equal(variable.numpy(), value)
    variable = made(plain, sharding=0)
    assert variable.shape == (8, 4) and variable.devices == plain.devices
    for i, shard in enumerate(variable.value().addressable_shards):
        np.testing.assert_array_equal(shard.data, WHOLE[2 * i : 2 * i + 2])


def test_nothing_says_that_a_variable_is_an_optimizers():
    strategy = sharded(shard="optimizer")
    assert lies_at(made(strategy)) is None
    assert "no `sharding`" in made(strategy).division.reason
    assert lies_at(made(strategy, sharding=0)) == 0


def test_the_name_is_the_path_for_the_users_choice():
    def by_name(path, leaf):
        return {"table": 1}.get(path)

    strategy = sharded(dimension=by_name)
    assert lies_at(made(strategy, name="table")) == 1
    assert lies_at(made(strategy, name="bias")) is None


def test_what_has_one_replica_or_none_is_whole():
    alone = js.OneDeviceStrategy(jax.devices()[0])
    assert lies_at(made(alone, sharding=0)) is None
    assert made(alone, sharding=0).division.reason == "there is one replica"
    assert lies_at(js.Variable(WHOLE, sharding=0)) is None
    central = js.experimental.CentralStorageStrategy(jax.devices()[:4], "CPU:0")
    assert lies_at(made(central, sharding=0)) is None


def test_on_read_variables_and_random_keys_are_never_divided():
    strategy = sharded()
    on_read = made(strategy, synchronization="on_read", aggregation="sum")
    assert on_read.distributed().stacked.shape == (4, 8, 4)
    assert on_read.division.dimension is None
    assert not isinstance(on_read, js.Sharded)
    keys = jax.random.split(jax.random.key(0), 8)
    assert lies_at(made(strategy, keys)) is None
    assert lies_at(made(strategy, keys, sharding=lambda shape, dtype: [2])) is None


WRONG = [
    ("yes", {}, TypeError, "`sharding` of variable 'w' was 'yes'; the number of"),
    (True, {}, TypeError, "was True; the number of the dimension"),
    (1.0, {}, TypeError, "was 1.0; the number"),
    (np.array([0, 1]), {}, TypeError, r"was array\(\[0, 1\]\); the number"),
    (2, {}, ValueError, r"was 2, but its shape is \(8, 4\)"),
    (-3, {}, ValueError, r"was -3, but its shape is \(8, 4\)"),
    (
        0,
        {"value": WHOLE[:6]},
        ValueError,
        r"4 replicas cannot divide dimension 0 of shape \(6, 4\) equally. Choose "
        "another dimension, or make it longer: 8",
    ),
    (
        0,
        {"value": lambda: jax.random.split(jax.random.key(0), 8)},
        ValueError,
        "random keys, which stay whole",
    ),
    (0, {"synchronization": "on_read"}, ValueError, "ON_READ, a copy for each replica"),
    (
        js.StateSharding(min_bytes=0, dimension=lambda path, leaf: 5),
        {},
        ValueError,
        "`dimension` returned 5 for `w`",
    ),
]


def test_choices_that_cannot_be(plain):
    for sharding, options, error, text in WRONG:
        with pytest.raises(error, match=text):
            made(plain, sharding=sharding, **options)
    with pytest.raises(ValueError, match="was 2, but its shape is"):
        js.Variable(WHOLE, sharding=2)


# What it starts with.


@pytest.mark.parametrize("is_large", [False, True])
def test_a_function_is_called_once_and_makes_parts(plain, is_large, monkeypatch):
    seen = []

    def start():
        array = jax.random.normal(jax.random.key(3), (8, 4)) * 0.1
        seen.append(isinstance(array, jax.core.Tracer))
        return array

    if is_large:
        monkeypatch.setattr(mesh, "_AT_ONCE_BYTES", 64)
        monkeypatch.delattr(Start, "array")
    variable = made(plain, start, sharding=0)
    assert seen == [True] and lies_at(variable) == 0
    wanted = np.asarray(jax.random.normal(jax.random.key(3), (8, 4)) * 0.1)
    np.testing.assert_array_max_ulp(variable.numpy(), wanted, 2 if is_large else 0)


def test_functions_of_other_sorts(plain):
    for start in (
        lambda: WHOLE,
        lambda: WHOLE.tolist(),
        lambda: [jnp.asarray(row) + 0 for row in WHOLE],
        lambda: jnp.asarray(WHOLE) if jnp.ones(()) > 0 else None,
        lambda: np.asarray(jnp.asarray(WHOLE) + 0),
    ):
        variable = made(plain, start, dtype="float32", sharding=0)
        assert lies_at(variable) == 0
        np.testing.assert_array_equal(variable.numpy(), WHOLE)


def test_a_function_reads_what_other_variables_hold(plain):
    first = made(plain, sharding=0)
    first.assign_add(WHOLE)
    second = made(plain, lambda: jnp.zeros_like(first) + first * 2, sharding=1)
    np.testing.assert_array_equal(second.numpy(), 4 * WHOLE)
    assert lies_at(second) == 1 and not first.cell.is_reference
    traced = jax.jit(lambda: first.value().sum())
    assert traced() == 2 * WHOLE.sum() and first.cell.is_reference
    third = made(plain, lambda: first - WHOLE, sharding=1)
    np.testing.assert_array_equal(third.numpy(), WHOLE)


def test_a_function_in_a_step_starts_with_constants_only(plain):
    def step(x):
        js.Variable(lambda: jnp.zeros((8, 4)) + x, sharding=0)

    with pytest.raises(TypeError, match="was given a value of the step that makes it"):
        plain.run(step, (1.0,))


STARTS = [
    (lambda: "text", TypeError, "was given 'text' to start with"),
    (lambda: np.array(["a"] * 8), TypeError, "to start with; an array, a number"),
    (np.array(["a"] * 8), TypeError, "to start with; an array, a number"),
    (np.array([2**40] * 8), ValueError, "holds -2147483648 to 2147483647"),
    (lambda: js.PerReplica(WHOLE), TypeError, "was given a PerReplica"),
]


def test_starts_that_cannot_be(plain):
    for value, error, text in STARTS:
        with pytest.raises(error, match=text):
            made(plain, value, sharding=0)


def test_the_dtype_is_that_which_was_asked_for(plain):
    values = WHOLE, lambda: jnp.asarray(WHOLE), lambda: WHOLE
    for dtype, value in itertools.product(("int32", "bfloat16"), values):
        variable = made(plain, value, dtype=dtype, trainable=False, sharding=0)
        assert variable.dtype == variable.value().dtype == jnp.dtype(dtype)
        assert variable.trainable is False
        np.testing.assert_array_equal(variable.numpy().astype("float32"), WHOLE)


# Reading and changing it.


def test_a_value_of_another_shape_changes_nothing(plain):
    variable = made(plain, sharding=0)
    for value in (WHOLE[:7], WHOLE[:, :3], 1.0, WHOLE[:1]):
        with pytest.raises(ValueError, match=r"has shape \(8, 4\) and was given"):
            variable.assign(value)
    np.testing.assert_array_equal(variable.numpy(), WHOLE)


def test_it_stands_for_its_value(plain):
    variable = made(plain, sharding=0)
    np.testing.assert_array_equal(variable + variable, 2 * WHOLE)
    np.testing.assert_array_equal(WHOLE.T @ variable, WHOLE.T @ WHOLE)
    np.testing.assert_array_equal(variable == WHOLE, WHOLE == WHOLE)
    np.testing.assert_array_equal(np.asarray(variable), WHOLE)
    np.testing.assert_array_equal(np.asarray(variable, "int32"), WHOLE.astype(int))
    np.testing.assert_array_equal(variable[2:4], WHOLE[2:4])
    np.testing.assert_array_equal(variable.sparse_read([7, 0]), WHOLE[[7, 0]])
    np.testing.assert_array_equal(jax.tree.leaves(variable)[0], WHOLE)
    assert len(variable) == 8 and variable.size == 32


def test_it_prints_the_parts(plain):
    assert repr(made(plain, WHOLE[:4, :2], sharding=0)) == (
        "Variable 'w' float32[4,2] divided along dimension 0, {\n"
        "  0: [[0., 1.]],\n  1: [[4., 5.]],\n  2: [[8., 9.]],\n  3: [[12., 13.]]\n}"
    )


def test_a_copy_lies_where_the_first_does(plain):
    first = made(plain, sharding=1)
    second = copy.deepcopy(first)
    first.assign_add(WHOLE)
    second.assign_sub(WHOLE)
    assert (lies_at(first), lies_at(second)) == (1, 1)
    np.testing.assert_array_equal(first.numpy(), 2 * WHOLE)
    np.testing.assert_array_equal(second.numpy(), 0 * WHOLE)


def test_the_methods_of_strategies_take_it():
    strategy = sharded()
    variable = made(strategy, sharding=0)
    np.testing.assert_array_equal(strategy.reduce("sum", variable), 4 * WHOLE)
    np.testing.assert_array_equal(strategy.reduce("mean", variable), WHOLE)
    np.testing.assert_array_equal(
        strategy.gather(variable, axis=0), np.concatenate([WHOLE] * 4)
    )
    np.testing.assert_array_equal(js.to_host({"w": variable})["w"], WHOLE)
    strategy.assert_in_sync({"w": variable, "n": strategy.mirror(1.0)})
    strategy.assert_in_sync(variable)
    copies = strategy.experimental_local_results(variable)
    assert len(copies) == 4 and len(set(map(id, copies))) == 4
    for each in copies:
        np.testing.assert_array_equal(each, WHOLE)
    assert strategy.extended.value_container(copies[1]) is variable
    assert strategy.extended.variable_created_in_scope(variable)
    total = strategy.extended.reduce_to(
        "sum", strategy.per_replica([1, 2, 3, 4]), variable
    )
    assert total == 10
