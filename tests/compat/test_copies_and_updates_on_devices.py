"""`extended.copy_to` and `extended.update_on`: copies and changes on devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.replicas import ids
from helpers.variables import copies, variable

import jaxstrategy as js
from jaxstrategy.compat import contrib

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


def test_what_cannot_be_copied_is_refused(two):
    for value in (ids(two), {"x": [ids(two)]}):
        with pytest.raises(ValueError, match="`extended.copy_to` was given a PerRepl"):
            two.extended.copy_to(value, "CPU:0")
    assert two.extended.copy_to(two.reduce("sum", ids(two)), "CPU:0") == 1.0
    for destinations, error, words in [
        (None, TypeError, "`destinations` was None; a device, a device name, a list"),
        (3.0, TypeError, "`destinations` was 3.0"),
        ([], ValueError, "The list of devices is empty"),
        ("CPU:99", ValueError, "Unknown device 'CPU:99'"),
        (["CPU:0", "CPU:0"], ValueError, "No duplicates are allowed"),
    ]:
        with pytest.raises(error, match=words):
            two.extended.copy_to(1.0, destinations)
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(js.errors.DonatedValueError, match="was donated to an earlier"):
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


# `extended.update_on`: changes on devices, of no variable of its own.


def everywhere(strategy):
    return strategy.extended.parameter_devices


def updated():
    return contrib.get_update_device()


def seen():
    return (
        js.in_cross_replica_context(),
        js.get_replica_context(),
        js.get_strategy(),
        js.has_strategy(),
    )


HOW = ("outside", "in scope", "in merge_call")


def called(strategy, how, fn):
    """What `fn(strategy)` returns in such a context."""
    if how == "in merge_call":
        return strategy.run(lambda: js.get_replica_context().merge_call(fn))
    if how == "in scope":
        with strategy.scope():
            return fn(strategy)
    return fn(strategy)


@pytest.mark.parametrize(
    ("kind", "how"),
    [*((kind, "outside") for kind in KINDS), *(("mirrored", how) for how in HOW[1:])],
)
def test_a_captured_variable_changes_once_on_each_copy(kind, how):
    strategy = KINDS[kind]()
    v, w = variable(strategy, 0.5), variable(strategy, 5.0)

    def change(x, w, by=0.0):
        w.assign_add(1.0)
        return v.assign_add(x + by)

    result = called(
        strategy,
        how,
        lambda s: s.extended.update_on(everywhere(s), change, (0.75, w), {"by": 0.25}),
    )
    assert result == 1.5 and isinstance(result, js.Mirrored)
    assert copies(strategy, v) == [1.5] * len(v.devices)
    assert copies(strategy, w) == [6.0] * len(v.devices)


@pytest.mark.parametrize("how", HOW)
def test_an_error_leaves_the_contexts_as_they_were(two, how):
    strategy = two
    v = variable(strategy)

    def fail():
        raise KeyError("mine")

    def nested():
        with pytest.raises(KeyError, match="mine"):
            strategy.extended.update(v, lambda v: fail())
        assert updated() == tuple(dict.fromkeys(everywhere(strategy)))
        fail()

    def attempt(s):
        before = seen(), updated()
        with pytest.raises(KeyError, match="mine"):
            s.extended.update_on(v, nested)
        assert (seen(), updated()) == before
        s.extended.update_on(v, lambda: v.assign(3.0))

    called(strategy, how, attempt)
    assert updated() is None and not js.has_strategy()
    assert v.value() == 3.0


def test_variables_of_servers_are_changed_once():
    strategy = js.ParameterServerStrategy(workers=1, backend="threads")
    v = variable(strategy, 1.0)

    def change(s, x):
        result = s.extended.update_on(v, lambda x: v.assign_add(x), (x,))
        return result, s.extended.copy_to(v, "CPU:0")

    assert change(strategy, 2.0) == (3.0, 3.0)

    coordinator = js.coordinator.ClusterCoordinator(strategy)

    @coordinator.function
    def scheduled(x):
        return change(strategy, x)

    done = coordinator.schedule(scheduled, (4.0,))
    assert done.fetch() == (7.0, 7.0)
    assert v.value() == 7.0
    strategy.close()
