"""`extended.copy_to`: copies of a value on devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.replicas import ids
from helpers.variables import variable

import jaxstrategy as js

KINDS = {
    "one": lambda: js.OneDeviceStrategy("CPU:1"),
    "mirrored": lambda: js.MirroredStrategy(["CPU:0", "CPU:1"]),
    "central": lambda: js.experimental.CentralStorageStrategy(
        ["CPU:2", "CPU:1"], "CPU:5"
    ),
    "shared": lambda: js.MirroredStrategy(["CPU:0", "CPU:1"], replicas_per_device=2),
    "wide": lambda: js.MirroredStrategy(jax.devices()[:4], logical_axes={"core": 2}),
    "divided": lambda: js.MirroredStrategy(
        ["CPU:0", "CPU:1"], sharding=js.StateSharding("state", 1)
    ),
}


@pytest.fixture(params=KINDS)
def strategy(request):
    return KINDS[request.param]()


def on(value):
    """The devices that have all of `value`."""
    assert value.is_fully_replicated
    return {shard.device for shard in value.addressable_shards}


def test_a_value_is_copied_to_each_device(strategy):
    copy_to = strategy.extended.copy_to
    v, devices = variable(strategy), jax.devices()
    cases = [
        ("CPU:1", {devices[1]}),
        (devices[3], {devices[3]}),
        (["CPU:1", devices[6]], {devices[1], devices[6]}),
        (strategy.extended.worker_devices, strategy._replicas.all_devices),
        (v, v.replicas.all_devices),
        (ids(strategy), strategy._replicas.all_devices),
        (strategy.reduce("sum", ids(strategy)), v.replicas.all_devices),
        (jax.device_put(1.0, devices[2]), {devices[2]}),
    ]
    for value in (3.0, np.float32(3), np.full(4, 3.0), jnp.full(4, 3.0)):
        for destinations, wanted in cases:
            copy = copy_to(value, destinations)
            assert on(copy) == wanted
            np.testing.assert_array_equal(copy, np.full(np.shape(value), 3.0))
    on_replicas = copy_to(3.0, v)
    assert v + on_replicas == v.numpy() + 3 and isinstance(on_replicas, js.Mirrored)


def test_the_default_strategy_copies():
    copy_to = js.get_strategy().extended.copy_to
    assert on(copy_to(2.0, "CPU:3")) == {jax.devices()[3]}
    assert copy_to(2.0, js.Variable(1.0)) == 2.0
    merged = js.get_replica_context().merge_call(
        lambda s: s.extended.copy_to(7.0, "CPU:2")
    )
    assert merged == 7.0


def test_versions_that_differ_are_refused(two):
    for value in (ids(two), {"x": [ids(two)]}):
        with pytest.raises(ValueError, match="`extended.copy_to` was given a PerRepl"):
            two.extended.copy_to(value, "CPU:0")
    assert two.extended.copy_to(two.reduce("sum", ids(two)), "CPU:0") == 1.0


def test_what_names_no_devices_is_refused(two):
    for destinations, error, words in [
        (None, TypeError, "`destinations` was None; a device, a device name, a list"),
        (3.0, TypeError, "`destinations` was 3.0"),
        ([], ValueError, "The list of devices is empty"),
        ("CPU:99", ValueError, "Unknown device 'CPU:99'"),
        (["CPU:0", "CPU:0"], ValueError, "No duplicates are allowed"),
    ]:
        with pytest.raises(error, match=words):
            two.extended.copy_to(1.0, destinations)


def test_a_donated_array_is_refused(two):
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(
        js.errors.DonatedValueError, match="was donated to an earlier call"
    ):
        two.extended.copy_to(x, ["CPU:0", "CPU:1"])


def test_a_variable_in_shards_is_a_destination_and_a_value():
    strategy = js.ParameterServerStrategy(
        workers=1,
        backend="threads",
        variable_partitioner=js.experimental.partitioners.FixedShardsPartitioner(2),
    )
    v = variable(strategy, np.arange(4.0, dtype=np.float32))
    assert isinstance(v, js.experimental.ShardedVariable)
    assert strategy.extended.copy_to(3.0, v) == 3.0
    copy = strategy.extended.copy_to(v, "CPU:1")
    np.testing.assert_array_equal(np.asarray(copy), np.arange(4.0))
    result = strategy.extended.update_on(v, lambda: v.assign_add(np.ones(4, "f")))
    assert result is v
    np.testing.assert_array_equal(v.numpy(), np.arange(4.0) + 1)
    strategy.close()
