"""Variables by name, gradients by variables, and variables in central storage."""

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids
from helpers.towers import STRATEGIES, mirrored, unwrapped

import jaxstrategy as js
from jaxstrategy.compat import contrib, v1
from jaxstrategy.compat.contrib import AUTO_REUSE, get_variable, variable_scope


@pytest.fixture(params=["mirrored-2", "one-device"])
def d(request):
    return STRATEGIES[request.param]()


def test_a_model_function_makes_its_variable_once(d):
    def model_fn():
        v = get_variable("foo", initializer=1.0)

        def merge_fn(d, v):
            d.update(v, lambda v: v.assign_add(1.0))

        contrib.get_tower_context().merge_call(merge_fn, v)
        return v

    with d.scope():
        v = d.call_for_each_tower(model_fn)
        assert isinstance(v, js.Variable) and v.name == "foo"
        assert v.strategy is d.core and v == 2.0
        assert unwrapped(d, v) == [2.0] * d.num_towers
        assert d.call_for_each_tower(model_fn) is v and v == 3.0
        assert get_variable("foo") is v


def test_each_strategy_has_its_own():
    d, other = mirrored(2), mirrored(2)
    with d.scope():
        v = get_variable("own", initializer=1.0)
    with other.scope():
        w = get_variable("own", initializer=2.0)
    ordinary = get_variable("test_each_strategy_has_its_own", initializer=3.0)
    assert v.strategy is d.core and w.strategy is other.core
    assert [float(v), float(w)] == [1.0, 2.0]
    assert ordinary.strategy is None
    assert get_variable("test_each_strategy_has_its_own") is ordinary


def test_the_generations_share_them():
    d = mirrored(2)
    with d.scope():
        v = get_variable("shared", initializer=1.0)
        assert v1.get_variable("shared") is v
    with d.core.scope():
        assert v1.get_variable("shared") is v
    assert d.core.run(lambda: v1.get_variable("shared")) is v


def test_they_live_as_long_as_the_strategy():
    d = mirrored(2)
    with d.scope():
        v = weakref.ref(get_variable("v", initializer=1.0))
    gc.collect()
    assert v() is not None
    del d
    gc.collect()
    assert v() is None


def test_a_failed_step_keeps_what_it_made():
    d, fail = mirrored(2), [True]

    def model_fn():
        v = get_variable("v", initializer=1.0)
        if fail:
            raise KeyError("model")
        return v.assign_add(1.0)

    with d.scope():
        with pytest.raises(KeyError, match="model"):
            d.call_for_each_tower(model_fn)
        fail.clear()
        assert d.call_for_each_tower(model_fn) == 2.0


def test_scopes_stand_before_names():
    with mirrored(2).scope():
        with variable_scope("a") as a:
            assert a.name == "a"
            with variable_scope("b"):
                v = get_variable("v", initializer=1.0)
            assert get_variable("w", initializer=1.0).name == "a/w"
        assert v.name == "a/b/v"
        with variable_scope("c"), variable_scope(a):
            assert get_variable("x", initializer=1.0).name == "a/x"
            with variable_scope("b"):
                assert get_variable("v") is v
        assert get_variable("y", initializer=1.0).name == "y"


def test_a_step_asks_for_a_name_once():
    d = mirrored(2)

    def twice(**reuse):
        with variable_scope("layer", **reuse):
            return [get_variable("w", initializer=1.0) for _ in range(2)]

    def again():
        with variable_scope("layer") as scope:
            first = get_variable("w", initializer=1.0)
            scope.reuse_variables()
            return first, get_variable("w")

    with d.scope():
        with pytest.raises(ValueError, match="'layer/w' already exists, disallowed"):
            d.call_for_each_tower(twice)
        v, w = d.call_for_each_tower(lambda: twice(reuse=AUTO_REUSE))
        assert v is w
        v, w = d.call_for_each_tower(again)
        assert v is w
        # Of a scope that is inside.
        with variable_scope("out", reuse=AUTO_REUSE):
            v, w = d.call_for_each_tower(twice)
            assert v is w and v.name == "out/layer/w"


def test_scopes_that_only_give_what_there_is():
    with mirrored(2).scope(), variable_scope("s", reuse=True):
        with pytest.raises(ValueError, match="'s/v' does not exist, or was not"):
            get_variable("v", initializer=1.0)
    with pytest.raises(ValueError, match="`reuse` was 3; True, False, None or AUTO"):
        with variable_scope("s", reuse=3):
            pass
    with pytest.raises(TypeError, match="`variable_scope` was given 3; a name"):
        with variable_scope(3):
            pass
    with pytest.raises(ValueError, match="`get_variable` was given an empty name"):
        get_variable("")


def test_shared_variables_are_what_was_asked_for():
    with mirrored(2).scope():
        v = get_variable("v", [2, 3])
        assert get_variable("v", (2, 3), jnp.float32) is v
        with pytest.raises(ValueError, match=r"'v', but specified shape \(3,\) and"):
            get_variable("v", 3)
        with pytest.raises(ValueError, match="specified dtype int32 and found dtype"):
            get_variable("v", dtype="int32")


def numbers(shape, **more):
    return np.arange(np.prod(shape)).reshape(shape).astype(more["dtype"])


INITIALIZERS = {
    "value": (None, None, [1.0, 2.0], [1.0, 2.0], "float32"),
    "integer": (None, None, 3, 3, "int32"),
    "value and dtype": (None, "float32", 3, 3.0, "float32"),
    "nothing": (None, "int32", lambda: np.arange(2), [0, 1], "int32"),
    "shape": ([2], None, lambda shape: np.full(shape, 4.0), [4.0, 4.0], "float32"),
    "numpy": ([2], "int32", np.ones, [1, 1], "int32"),
    "shape and dtype": ([2, 1], None, numbers, [[0.0], [1.0]], "float32"),
    "key": ([2], None, jax.nn.initializers.ones, [1.0, 1.0], "float32"),
    "default of integers": (2, "int32", None, [0, 0], "int32"),
    "default of bools": ([], bool, None, False, "bool"),
}


@each_of("case", INITIALIZERS)
def test_initial_values(case):
    shape, dtype, initializer, expected, kind = INITIALIZERS[case]
    with mirrored(2).scope():
        v = get_variable("v", shape, dtype, initializer)
    assert v.numpy().tolist() == expected and v.dtype == kind


@each_of("arguments, error, words", [
    ({}, ValueError, "must be fully defined"),
    ({"shape": [2], "initializer": 1.0}, ValueError, "do not specify `shape`"),
    ({"shape": [2], "dtype": "complex64"}, ValueError, "An initializer for variable"),
    ({"shape": "a"}, TypeError, "`shape` was 'a'; whole numbers were wanted"),
    ({"shape": [2.5]}, TypeError, "`shape` was .2.5.; whole numbers"),
])  # fmt: skip
def test_what_cannot_be_made_is_refused(arguments, error, words):
    with mirrored(2).scope(), pytest.raises(error, match=words):
        get_variable("v", **arguments)


def test_a_partitioner_is_dropped_with_a_warning():
    with mirrored(2).scope():
        with pytest.warns(UserWarning, match="partitioner for 'v', which is") as w:
            v = get_variable("v", [4], partitioner=lambda shape, dtype: [2])
    assert isinstance(v, js.Variable) and w[0].filename == __file__


# `CentralStorageStrategy`, and what every strategy computes with variables.


def central(devices=("CPU:0", "CPU:1"), home=None):
    return js.experimental.CentralStorageStrategy(devices, home)


@pytest.fixture(scope="module")
def storage():
    return central(jax.devices()[:3], "CPU:7")


def variable(strategy, start=0.0, **options):
    with strategy.scope():
        return js.Variable(start, **options)


def test_devices_by_default():
    strategy = js.experimental.CentralStorageStrategy()
    assert strategy.devices == tuple(jax.devices())
    assert strategy.extended.parameter_devices == (jax.devices()[0],)
    strategy = central(["CPU:3", "CPU:1"])
    assert strategy.extended.parameter_devices == (jax.devices()[3],)
    assert strategy.num_replicas_in_sync == 2
    assert repr(strategy) == "CentralStorageStrategy(2 replicas on cpu:3, cpu:1)"


@each_of("home", ["CPU:5", "/cpu:5", 5])
def test_a_parameter_device_of_choice(home):
    home = jax.devices()[home] if isinstance(home, int) else home
    strategy = js.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], home)
    assert strategy.extended.parameter_devices == (jax.devices()[5],)
    assert strategy.extended.worker_devices == tuple(jax.devices()[:2])
    assert variable(strategy).devices == (jax.devices()[5],)


@each_of("devices, home, error, words", [
    ([], None, ValueError, "empty|[Nn]o devices"),
    (["CPU:0", "CPU:0"], None, ValueError, "No duplicates"),
    (["CPU:99"], None, ValueError, "Unknown device 'CPU:99'"),
    (["CPU:0"], "CPU:99", ValueError, "Unknown device 'CPU:99'"),
    (["CPU:0"], 3.5, TypeError, "3.5"),
])  # fmt: skip
def test_devices_that_are_none(devices, home, error, words):
    with pytest.raises(error, match=words):
        central(devices, home)


def test_a_copy_keeps_the_parameter_device():
    twin = copy.deepcopy(central(home="CPU:5"))
    assert twin.extended.parameter_devices == (jax.devices()[5],)
    assert variable(twin, 1.0).devices == (jax.devices()[5],)


def held(marked):
    """How many arrays of `marked` numbers lie on each device, by its id."""
    gc.collect()
    shards = [
        shard
        for array in jax.live_arrays()
        if marked in array.shape and not array.is_deleted()
        for shard in array.addressable_shards
        if not shard.data.is_deleted()
    ]
    at = {(s.device.id, s.data.unsafe_buffer_pointer()) for s in shards}
    ids = [device for device, _ in at]
    return {device: ids.count(device) for device in sorted(set(ids))}


@each_of("home", [1, 5])
def test_between_steps_there_is_one_copy(home):
    strategy, size = central(home=f"CPU:{home}"), 4321 + home
    v = variable(strategy, np.zeros(size, np.float32), aggregation="mean")

    @strategy.run
    def step(x):
        v.assign_add(x * jnp.ones(size))

    x = ids(strategy)
    for _ in range(3):
        step(x)
    jax.block_until_ready(v.value())
    assert held(size) == {home: 1}  # looked at once: JAX keeps what it has shown
    assert len(v.distributed().addressable_shards) == 1
    assert v.distributed().devices() == {jax.devices()[home]}
    np.testing.assert_allclose(v.numpy(), np.full(size, 1.5))
