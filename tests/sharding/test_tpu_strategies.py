"""`TPUStrategy` on any platform: which replica has which devices, and what it computes.

The numbers are those of TensorFlow's tests of its strategy.
"""

import copy
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager
from jaxstrategy.cluster_resolver import TPUClusterResolver
from jaxstrategy.tpu import _topology
from jaxstrategy.tpu.experimental import (
    DeviceAssignment,
    Topology,
    initialize_tpu_system,
)

MESH = [2, 2, 1, 2]
CORES = [[x, y, 0, core] for y in (0, 1) for x in (0, 1) for core in (0, 1)]
TOPOLOGY = Topology(mesh_shape=MESH, device_coordinates=[CORES])


@pytest.fixture(autouse=True)
def as_at_the_beginning(monkeypatch):
    monkeypatch.setattr(_topology, "_initialized", set())


@pytest.fixture(scope="module", params=[1, 2, 4], ids="{}-cores".format)
def tpu(request):
    return js.TPUStrategy(cores_per_replica=request.param)


@pytest.fixture(scope="module")
def pairs():
    return js.TPUStrategy(cores_per_replica=2)


def on(*cores):
    """A strategy of replicas of one core each."""
    return js.TPUStrategy(
        experimental_device_assignment=DeviceAssignment(
            TOPOLOGY, [[CORES[core]] for core in cores]
        )
    )


def ids(strategy):
    """The device ids of each replica."""
    replicas = strategy._replicas
    return [[d.id for d in replicas.devices_of(i)] for i in range(replicas.count)]


def total(x):
    return js.get_replica_context().all_reduce("sum", x)


# Devices.


def test_without_a_tpu_each_device_is_a_replica():
    strategy = js.TPUStrategy()
    assert strategy.num_replicas_in_sync == 8
    found = strategy.run(lambda: js.get_replica_context().replica_id_in_sync_group)
    assert [int(i) for i in strategy.experimental_local_results(found)] == [*range(8)]
    assert strategy.mesh.axis_names == ("replica",)
    assert isinstance(strategy.cluster_resolver, TPUClusterResolver)
    assert repr(strategy) == "TPUStrategy(8 replicas on cpu:0..7)"


@pytest.mark.parametrize(
    ("cores", "axes"),
    [
        (2, {"core": 2}),
        (4, {"core_0": 2, "core_1": 2}),
        (8, {"core_0": 2, "core_1": 2, "core_2": 2}),
    ],
)
def test_there_is_an_axis_for_each_prime_factor(cores, axes):
    strategy = js.TPUStrategy(cores_per_replica=cores)
    assert dict(strategy.mesh.shape) == {"replica": 8 // cores, **axes}
    assert ids(strategy) == np.arange(8).reshape(-1, cores).tolist()
    assert strategy.extended.worker_devices == tuple(jax.devices()[::cores])


def test_axes_of_other_numbers_of_cores():
    topology = Topology(
        mesh_shape=[8, 1, 1, 1],
        device_coordinates=[[[x, 0, 0, 0] for x in range(8)]],
    )
    six = DeviceAssignment.build(topology, computation_shape=[6, 1, 1, 1])
    strategy = js.TPUStrategy(experimental_device_assignment=six)
    assert dict(strategy.mesh.shape) == {"replica": 1, "core_0": 2, "core_1": 3}
    x = np.arange(36.0, dtype=np.float32).reshape(6, 6)
    for splits in ([6, 1], [1, 6], [2, 3], [3, 2]):
        found = strategy.experimental_split_to_logical_devices(x, splits)
        assert found.sharding.shard_shape(x.shape) == (6 // splits[0], 6 // splits[1])
        np.testing.assert_array_equal(found, x)


def test_an_assignment_says_which_replica_has_which_devices():
    assignment = DeviceAssignment.build(
        TOPOLOGY, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    strategy = js.TPUStrategy(experimental_device_assignment=assignment)
    assert ids(strategy) == [[0, 1], [2, 3], [6, 7], [4, 5]]
    same = js.TPUStrategy(
        experimental_device_assignment=assignment, cores_per_replica=2
    )
    assert same.mesh == strategy.mesh
    older = js.experimental.TPUStrategy(device_assignment=assignment)
    assert older.mesh == strategy.mesh


def test_the_topology_that_is_here_fits():
    assignment = DeviceAssignment.build(
        initialize_tpu_system(), computation_shape=[4, 1, 1, 1], num_replicas=2
    )
    strategy = js.TPUStrategy(TPUClusterResolver(), assignment)
    assert ids(strategy) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_strategies_on_some_cores():
    first, second = on(0), on(1)
    assert first.extended.worker_devices == (jax.devices()[0],)
    assert second.extended.worker_devices == (jax.devices()[1],)
    everywhere = js.TPUStrategy()
    with everywhere.scope():
        v = js.Variable(0.0)
    found = [one.run(lambda x: x + 1.0, (v.value(),)) for one in (first, second)]
    assert sum(map(float, found)) == 2.0


def test_replicas_in_another_order():
    forth, back = on(0, 1), on(1, 0)
    reads = []
    for strategy in (forth, back):
        with strategy.scope():
            v = js.Variable(
                0, synchronization="ON_READ", aggregation="ONLY_FIRST_REPLICA"
            )
        strategy.run(lambda x, v=v: v.assign(x), (strategy.per_replica([1, 42]),))
        copies = [(*x.devices(), x) for x in v.distributed().values]
        reads.append({device.id: int(x) for device, x in copies})
    assert reads == [{0: 1, 1: 42}, {1: 1, 0: 42}]


def test_one_strategy_after_another():
    two, one = on(0, 1), on(0)
    squares = two.run(lambda x: jnp.square(x), (two.mirror(np.asarray([2.0, 2.0])),))
    (first, *_) = two.experimental_local_results(squares)
    np.testing.assert_array_equal(one.run(jnp.square, (first,)), [16.0, 16.0])


def test_a_local_tpu_is_this_process():
    local = js.TPUStrategy(TPUClusterResolver("local"), cores_per_replica=2)
    assert ids(local) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert local.cluster_resolver.is_local


def test_a_copy_of_a_strategy(pairs):
    twin = copy.deepcopy(pairs)
    assert twin.mesh == pairs.mesh and twin.cluster_resolver is pairs.cluster_resolver
    with pytest.raises(ValueError, match="in SPMD mode"):
        twin.experimental_assign_to_logical_device(1.0, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"cores_per_replica": 3}, ValueError, "was 3, and 8 devices are no multiple"),
        ({"cores_per_replica": 0}, ValueError, "was 0; at least 1 was wanted"),
        ({"cores_per_replica": 2.0}, TypeError, "was 2.0; a whole number was wanted"),
        ({"tpu_cluster_resolver": "x"}, TypeError, "A `TPUClusterResolver` was wanted"),
        (
            {"experimental_device_assignment": [[[0, 0, 0, 0]]]},
            TypeError,
            "`experimental_device_assignment` was .*DeviceAssignment` was wanted",
        ),
        (
            {
                "experimental_device_assignment": DeviceAssignment.build(TOPOLOGY),
                "cores_per_replica": 2,
            },
            ValueError,
            "was 2, and the device assignment has 1. Leave `cores_per_replica` out",
        ),
        (
            {
                "experimental_device_assignment": DeviceAssignment(
                    TOPOLOGY, [[CORES[0]], [CORES[0]]]
                )
            },
            ValueError,
            "has cpu:0 more than once",
        ),
        (
            {
                "experimental_device_assignment": DeviceAssignment(
                    Topology(
                        mesh_shape=MESH, device_coordinates=[CORES[:4], CORES[4:]]
                    ),
                    [[CORES[0]]],
                )
            },
            ValueError,
            "2 tasks of 4 devices.*here are 1 process.* with 8 devices",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        js.TPUStrategy(**arguments)


# Steps.


def test_a_chain_of_steps(tpu):
    value = tpu.run(lambda: jnp.zeros(()))
    for _ in range(10):
        value = tpu.run(lambda x: x + 1, (value,))
    assert tpu.reduce("sum", value) == 10 * tpu.num_replicas_in_sync


def test_on_read_variables_are_reduced(tpu):
    n = tpu.num_replicas_in_sync
    with tpu.scope():
        w = js.Variable(
            (0.0,), synchronization="ON_READ", aggregation="ONLY_FIRST_REPLICA"
        )

    def step(x):
        w.assign(x + w.value())
        return total(w.value()) + x

    x = np.arange(n, dtype=np.float32)
    found = tpu.run(step, (tpu.per_replica(list(x[:, None])),))
    found = np.ravel([np.asarray(y) for y in tpu.experimental_local_results(found)])
    np.testing.assert_array_equal(found, x + n * (n - 1) / 2)
    np.testing.assert_array_equal(w.value(), [0.0])


def test_variables_made_outside_of_the_scope(tpu):
    v = js.Variable(2.0)
    x = np.arange(tpu.num_replicas_in_sync, dtype=np.float32)
    found = tpu.run(lambda x: x + v.value(), (tpu.per_replica(list(x)),))
    local = [float(y) for y in tpu.experimental_local_results(found)]
    assert local == [i + 2.0 for i in x]


def test_a_branch_by_the_replica():
    strategy = on(0, 1)

    def step():
        index = js.get_replica_context().replica_id_in_sync_group
        return lax.switch(index, [lambda: 2, lambda: 3])

    found = strategy.experimental_local_results(strategy.run(step))
    assert [int(x) for x in found] == [2, 3]


def test_nothing_and_empty_containers_come_back(tpu):
    found = tpu.run(lambda x: (x, None, [], {"a": ()}), (None,))
    assert found == (None, None, [], {"a": ()})


def test_results_stay_on_the_devices_of_their_replica(tpu):
    found = tpu.run(lambda: js.get_replica_context().replica_id_in_sync_group * 2)
    for i, value in enumerate(found.values):
        assert value.devices() == set(tpu._replicas.devices_of(i))


def test_sums_of_segments():
    strategy = on(0, 1)
    values = strategy.per_replica([[0.0, 1.0, 0.0], [1.0, 2.0, 8.0]])
    found = strategy.run(
        lambda x: jax.ops.segment_sum(x, jnp.asarray([0, 0, 1]), num_segments=2)[::-1],
        (values,),
    )
    local = [x.tolist() for x in strategy.experimental_local_results(found)]
    assert local == [[0.0, 1.0], [8.0, 3.0]]


# Logical devices.


def test_variables_on_logical_devices(pairs, tmp_path):
    n = pairs.num_replicas_in_sync
    with pairs.scope():
        with pairs.extended.experimental_logical_device(0):
            v = js.Variable(2.0)
        with pairs.extended.experimental_logical_device(1):
            w = js.Variable(3.0)

    @pairs.run
    def step(five):
        with pairs.extended.experimental_logical_device(0):
            y = v.value() * five
        with pairs.extended.experimental_logical_device(1):
            return total(w.value() * y)

    assert step(5.0) == 30 * n
    manager = CheckpointManager(tmp_path)
    manager.save(0, {"v": v, "w": w})
    v.assign(1.0), w.assign(4.0)
    assert step(5.0) == 20 * n
    manager.restore({"v": v, "w": w})
    assert step(5.0) == 30 * n


@pytest.mark.parametrize("number", [2, -1, 1.0, None])
def test_logical_devices_that_are_not_there(pairs, number):
    text = f"`logical_device_id` not in range: it was {number}, and a replica has 2"
    with pytest.raises(ValueError, match=re.escape(text)):
        with pairs.extended.experimental_logical_device(number):
            pass
    assigning = js.TPUStrategy(
        experimental_spmd_xla_partitioning=False, cores_per_replica=2
    )
    for strategy, told in ((pairs, "in SPMD mode"), (assigning, re.escape(text))):
        with pytest.raises(ValueError, match=told):
            strategy.experimental_assign_to_logical_device(1.0, number)


def test_a_replica_of_one_device_has_one_logical_device():
    with pytest.raises(ValueError, match="and a replica has 1, with the numbers 0"):
        with js.MirroredStrategy().extended.experimental_logical_device(1):
            pass


def test_values_are_assigned_to_logical_devices(pairs):
    with pytest.raises(ValueError, match="Cannot assign a tensor to a logical device"):
        pairs.experimental_assign_to_logical_device(np.ones(3), 0)
    older = js.experimental.TPUStrategy(
        device_assignment=DeviceAssignment.build(TOPOLOGY, [1, 1, 1, 2])
    )

    def step(x):
        y = older.experimental_assign_to_logical_device(x * 2, 0)
        return older.experimental_assign_to_logical_device(y + 1, 1)

    np.testing.assert_array_equal(older.run(step, (np.arange(3.0),)), [1.0, 3.0, 5.0])


def test_an_initial_value_that_is_a_function_is_made_once(pairs):
    calls = []

    def initial():
        calls.append(1)
        return jax.random.normal(jax.random.key(len(calls)), (4,))

    with pairs.scope():
        v = js.Variable(initial)
    assert len(calls) == 1
    shards = [np.asarray(shard.data) for shard in v.value().addressable_shards]
    assert len(shards) == 8
    for shard in shards:
        np.testing.assert_array_equal(shard, shards[0])


def test_what_a_step_logs(pairs):
    events = []
    with pairs.scope():
        number = js.Variable(1, aggregation="ONLY_FIRST_REPLICA")

    def step():
        value = 2 * number.value()
        number.assign_add(1)
        return value

    with js.profiling.MetricLogger(lambda n, found: events.append((n, found))) as log:
        for i in range(1, 11):
            log(i, {"value": pairs.run(step)})
    assert [(n, float(found["value"])) for n, found in events] == [
        (i, 2.0 * i) for i in range(1, 11)
    ]
    copies = pairs.experimental_local_results(number)
    assert [int(x) for x in copies] == [11] * 4


def test_callbacks_of_replicas_of_one_device():
    strategy = js.TPUStrategy()

    def step(x):
        y = x + 1
        y = jax.pure_callback(lambda y: y + 1, jax.typeof(y), y)
        return total(strategy.experimental_split_to_logical_devices(y + 1, [1, 1]))

    found = strategy.run(step, (np.zeros((2, 2), np.int32),))
    np.testing.assert_array_equal(found, np.full((2, 2), 3 * 8))
