"""`TPUStrategy` on any platform: which replica has which devices, and what it computes.

The numbers are those of TensorFlow's tests of its strategy.
"""

import re

import jax
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js
from jaxstrategy._src.tpu import topology
from jaxstrategy.checkpoint import CheckpointManager
from jaxstrategy.cluster_resolver import TPUClusterResolver
from jaxstrategy.tpu.experimental import DeviceAssignment, Topology

MESH = [2, 2, 1, 2]
CORES = [[x, y, 0, core] for y in (0, 1) for x in (0, 1) for core in (0, 1)]
TOPOLOGY = Topology(mesh_shape=MESH, device_coordinates=[CORES])


@pytest.fixture(autouse=True)
def as_at_the_beginning(monkeypatch):
    monkeypatch.setattr(topology, "_initialized", set())


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


def test_without_a_tpu_each_device_is_a_replica():
    strategy = js.TPUStrategy()
    assert strategy.num_replicas_in_sync == 8
    found = strategy.run(lambda: js.get_replica_context().replica_id_in_sync_group)
    assert [int(i) for i in strategy.experimental_local_results(found)] == [*range(8)]
    assert strategy.mesh.axis_names == ("replica",)
    assert isinstance(strategy.cluster_resolver, TPUClusterResolver)
    assert repr(strategy) == "TPUStrategy(8 replicas on cpu:0..7)"


@each_of(
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


def assigned(assignment, **more):
    return {"experimental_device_assignment": assignment, **more}


TWO_TASKS = Topology(mesh_shape=MESH, device_coordinates=[CORES[:4], CORES[4:]])


@each_of(
    ("arguments", "error", "text"),
    [
        ({"cores_per_replica": 3}, ValueError, "was 3, and 8 devices are no multiple"),
        ({"cores_per_replica": 0}, ValueError, "was 0; at least 1 was wanted"),
        ({"cores_per_replica": 2.0}, TypeError, "was 2.0; a whole number was wanted"),
        ({"tpu_cluster_resolver": "x"}, TypeError, "A `TPUClusterResolver` was wanted"),
        (assigned([[[0, 0, 0, 0]]]), TypeError,
         "`experimental_device_assignment` was .*DeviceAssignment` was wanted"),
        (assigned(DeviceAssignment.build(TOPOLOGY), cores_per_replica=2), ValueError,
         "was 2, and the device assignment has 1. Leave `cores_per_replica` out"),
        (assigned(DeviceAssignment(TOPOLOGY, [[CORES[0]], [CORES[0]]])), ValueError,
         "has cpu:0 more than once"),
        (assigned(DeviceAssignment(TWO_TASKS, [[CORES[0]]])), ValueError,
         "2 tasks of 4 devices.*here are 1 process.* with 8 devices"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        js.TPUStrategy(**arguments)


def test_on_read_variables_are_reduced(pairs):
    n = pairs.num_replicas_in_sync
    with pairs.scope():
        w = js.Variable(
            (0.0,), synchronization="ON_READ", aggregation="ONLY_FIRST_REPLICA"
        )

    def step(x):
        w.assign(x + w.value())
        return total(w.value()) + x

    x = np.arange(n, dtype=np.float32)
    found = pairs.run(step, (pairs.per_replica(list(x[:, None])),))
    found = np.ravel([np.asarray(y) for y in pairs.experimental_local_results(found)])
    np.testing.assert_array_equal(found, x + n * (n - 1) / 2)
    np.testing.assert_array_equal(w.value(), [0.0])


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


@each_of("number", [2, -1, 1.0, None])
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
