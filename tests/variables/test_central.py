"""`CentralStorageStrategy`, and what every strategy computes with variables."""

import copy
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids

import jaxstrategy as js


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


@pytest.mark.slow
def test_replicas_assign_an_aggregate(storage):
    n, x = storage.num_replicas_in_sync, ids(storage, 1.0)
    wanted = {"sum": n * (n + 1) / 2, "mean": (n + 1) / 2, "only_first_replica": 1.0}
    each = {how: variable(storage, aggregation=how) for how in wanted}

    def step(method, x):
        return {how: getattr(v, method)(x) for how, v in each.items()}

    assert storage.run(step, ("assign", x)) == wanted
    for v in each.values():
        v.assign(10.0)
    added = storage.run(step, ("assign_add", x))
    assert added == {how: 10 + number for how, number in wanted.items()}
    storage.run(step, ("assign_sub", x))
    for v in each.values():
        assert v.value() == 10.0
        assert v.distributed().devices() == set(storage.extended.parameter_devices)


def test_an_error_in_a_step_leaves_variables_as_they_were(storage):
    v = variable(storage, 1.0)

    @storage.run
    def step(x):
        v.assign_add(2.0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step(1.0)
    assert v.value() == 1.0


def test_several_steps_in_one_function_of_the_users_are_refused():
    strategy = central()
    v = variable(strategy, 1.0, name="kept")

    @jax.jit
    def several(x):
        return strategy.run(lambda x: v.assign_add(x), (x,))

    with pytest.raises(js.errors.PlacementError, match="'kept' lives on cpu:0, not on"):
        several(2.0)
    with pytest.raises(js.errors.PlacementError, match="Call the step outside, or"):
        jax.lax.scan(
            lambda c, _: (strategy.run(lambda x: v.assign_add(x), (c,)), None),
            1.0,
            length=2,
        )
    assert v.value() == 1.0
    assert strategy.run(lambda x: v.assign_add(x), (2.0,)) == 3.0


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


def start():
    """And its weights."""
    w1 = 0.3 * np.sin(0.7 * np.arange(60) + 1).reshape(6, 10)
    w2 = 0.3 * np.sin(0.7 * np.arange(30) + 2).reshape(10, 3)
    return [a.astype(np.float32) for a in (w1, np.zeros(10), w2, np.zeros(3))]
