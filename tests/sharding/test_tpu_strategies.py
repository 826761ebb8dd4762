"""`TPUStrategy`, topologies and device assignments have the numbers of TensorFlow."""

import re

import jax
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.oracle import recorded

import jaxstrategy as js
from jaxstrategy._src.tpu import topology
from jaxstrategy.checkpoint import CheckpointManager
from jaxstrategy.cluster_resolver import TPUClusterResolver
from jaxstrategy.tpu.experimental import (
    DeviceAssignment,
    DeviceOrderMode,
    Topology,
)

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


# Topologies and device assignments of TPUs have TensorFlow's numbers.

ORACLE = recorded("tpu_assignments.json")


def made(mesh=MESH, tasks=1, drop=0):
    """The cores of each chip one after the other, chips along x first."""
    x, y, z, cores = map(range, mesh)
    all_ = [[i, j, k, c] for k in z for j in y for i in x for c in cores]
    found = np.reshape(all_, (tasks, -1, 4))
    return Topology(
        mesh_shape=mesh, device_coordinates=found[:, : found.shape[1] - drop]
    )


def built(case):
    return DeviceAssignment.build(
        made(case["mesh"], case["tasks"], case["drop"]),
        case["shape"],
        case["stride"],
        case["num_replicas"],
        DeviceOrderMode[case["mode"] or "AUTO"],
    )


def test_assignments_are_tensorflows():
    assert len(ORACLE["assignments"]) > 90
    for case in ORACLE["assignments"]:
        found = built(case)
        wanted = np.asarray(case["core_assignment"])
        np.testing.assert_array_equal(found.core_assignment, wanted, str(case))
        assert found.num_replicas == len(wanted)
        assert found.num_cores_per_replica == wanted.shape[1]


def test_what_tensorflow_refuses_is_refused():
    assert len(ORACLE["errors"]) > 15
    for case in ORACLE["errors"]:
        with pytest.raises(ValueError):
            built(case)


def test_a_replica_for_each_chip():
    found = DeviceAssignment.build(
        made(), computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    assert found.core_assignment.tolist() == [
        [[0, 0, 0, 0], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [1, 0, 0, 1]],
        [[1, 1, 0, 0], [1, 1, 0, 1]],
        [[0, 1, 0, 0], [0, 1, 0, 1]],
    ]
    assert found.coordinates(2, 1) == (1, 1, 0, 1)
    assert found.tpu_ordinal(2, 1) == 7 and found.tpu_ordinal() == 0
    assert found.tpu_device(2, 1) == "/task:0/device:TPU:7"
    assert found.tpu_device(2, 1, job="worker") == "/job:worker/task:0/device:TPU:7"
    assert found.host_device(3) == "/task:0/device:CPU:0"
    assert repr(found) == "DeviceAssignment(4 replicas of 2 cores)"


@each_of(
    ("arguments", "text"),
    [
        (([1, 1, 1, 2], None, 5), "requested 5 replicas but only 4 replicas fit"),
        (([1, 1, 2],), r"computation_shape must have shape \[4\].*got \[1, 1, 2\]"),
        (([0, 1, 1, 2],), "computation_shape must be positive"),
        (([4, 1, 1, 1],), r"footprint \[4, 1, 1, 1\] does not fit in TPU topology"),
        ((None, [1, 1, 2]), r"computation_stride must have shape \[4\]"),
        ((None, [0, 1, 1, 1]), "computation_stride must be positive"),
        (([2, 1, 1, 1], [2, 1, 1, 1]), "does not fit in TPU topology"),
        ((None, None, 0), "`num_replicas` was 0; a positive whole number"),
        ((None, None, 2.0), "`num_replicas` was 2.0; a positive whole number"),
        ((None, None, 2, DeviceOrderMode.RING), "RING, but a ring needs.*Use AUTO"),
        ((None, None, 2, 7), "7 is not a valid DeviceOrderMode"),
    ],
)
def test_assignments_that_cannot_be_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        DeviceAssignment.build(made(), *arguments)


def test_the_shape_of_replicas_in_a_line_is_told():
    line = made([8, 1, 1, 1])
    with pytest.raises(ValueError, match=r"in a line: give \[2, 1, 1, 1\] for .*2 d"):
        DeviceAssignment.build(line, [1, 1, 1, 2], num_replicas=4)
    found = DeviceAssignment.build(line, [2, 1, 1, 1], num_replicas=4)
    assert found.core_assignment[:, :, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match="`computation_stride`.$"):
        DeviceAssignment.build(line, [4, 4, 1, 1])


def test_assignments_of_what_is_left_are_in_the_order_of_tasks():
    lacking = made(tasks=2, drop=1)
    assert lacking.missing_devices.tolist() == [[1, 0, 0, 1], [1, 1, 0, 1]]
    found = DeviceAssignment.build(lacking, [1, 1, 1, 2], num_replicas=3)
    assert found.core_assignment.tolist() == [
        [[0, 0, 0, 0], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0]],
        [[0, 1, 0, 1], [1, 1, 0, 0]],
    ]
    with pytest.raises(ValueError, match="lacks 2 devices.*no RING, and no stride"):
        DeviceAssignment.build(lacking, computation_stride=[2, 1, 1, 1])
    with pytest.raises(ValueError, match="no RING, and no stride"):
        DeviceAssignment.build(lacking, device_order_mode=DeviceOrderMode.RING)
    with pytest.raises(ValueError, match="only 3 replicas fit, each of 2 devices of"):
        DeviceAssignment.build(lacking, [1, 1, 1, 2], num_replicas=4)


@each_of(
    ("cores", "text"),
    [
        ([[0, 0, 0, 0]], "must be a rank 3 numpy array"),
        ([[[0, 0, 0, 0.5]]], "must be a rank 3 numpy array of whole numbers"),
        (np.zeros((0, 1, 4), int), "must be a rank 3 numpy array"),
        ([[[0, 0, 0]]], r"must have size equal to topology rank \(4\)"),
        ([[[0, 0, 0, 7]]], r"no device at the coordinates \[0, 0, 0, 7\]"),
    ],
)
def test_cores_that_cannot_be_assigned_are_refused(cores, text):
    with pytest.raises(ValueError, match=text):
        DeviceAssignment(made(), cores)


@each_of("make", [DeviceAssignment.build, DeviceAssignment])
def test_something_else_than_a_topology_is_refused(make):
    others = ["x", None, js.profiling.Topology(bandwidth=1e9, latency=1e-6, replicas=8)]
    for other in others:
        arguments = (other,) if make is DeviceAssignment.build else (other, [[[0] * 4]])
        with pytest.raises(ValueError, match="topology must be a Topology object, got"):
            make(*arguments)


def test_replicas_are_looked_up_by_task_and_core():
    found = DeviceAssignment.build(made(tasks=2), [1, 1, 1, 2], num_replicas=4)
    assert found.lookup_replicas(0, 0) == found.lookup_replicas(0, 1) == [0, 1]
    assert found.lookup_replicas(1, 0) == [2, 3]
    with pytest.raises(ValueError, match="Can not find any replica in task: 2 contain"):
        found.lookup_replicas(2, 0)
    with pytest.raises(ValueError, match="contains logical_core: 2"):
        found.lookup_replicas(0, 2)
    twice = DeviceAssignment(made(), [[[0, 0, 0, 0]], [[0, 0, 0, 0]]])
    assert twice.lookup_replicas(0, 0) == [0, 1]


@each_of("numbers", [(4, 0), (0, 2), (-1, 0), (0, -1), (0.0, 0)])
def test_cores_that_are_not_there_are_refused(numbers):
    found = DeviceAssignment.build(made(), [1, 1, 1, 2], num_replicas=4)
    for ask in (found.coordinates, found.tpu_ordinal, found.tpu_device):
        with pytest.raises(ValueError, match=r"a number from 0 to [13] was wanted"):
            ask(*numbers)


@each_of(
    ("coordinates", "text"),
    [
        ([[0, 0, 0, 0]], r"must be a rank 3 array of whole numbers, \[task, device, 4"),
        ([[[0, 0, 0, 0.5]]], "must be a rank 3 array of whole numbers"),
        (None, "must be a rank 3 array"),
        ([[[0, 0, 0, 2]]], r"has \[0, 0, 0, 2\], which lies outside of the mesh"),
        ([[[0, -1, 0, 0]]], "lies outside of the mesh"),
        ([[[0, 1, 0, 0], [0, 1, 0, 0]]], "the same coordinates for two devices"),
    ],
)
def test_coordinates_that_cannot_be_are_refused(coordinates, text):
    with pytest.raises(ValueError, match=text):
        Topology(mesh_shape=MESH, device_coordinates=coordinates)


def test_serialized_topologies_are_tensorflows():
    for case in ORACLE["serialized"]:
        one = made(case["mesh"], case["tasks"])
        assert one.serialized().hex() == case["hex"]
        again = Topology(bytes.fromhex(case["hex"]))
        assert again.device_coordinates.tolist() == one.device_coordinates.tolist()
        assert again.mesh_shape.tolist() == case["mesh"]
        assert again.serialized() == one.serialized()


@each_of(
    ("serialized", "text"),
    [
        (b"\x0a\x09\x01", "A serialized topology was wanted.*got b"),
        (b"\x0b", "A serialized topology was wanted.*got b"),
        (b"\x0a\x04\x02\x02\x01\x02\x10\x01\x18\x08", "has 0 coordinates; 32 were"),
        ([8], r"A serialized topology was wanted.*got \[8\]"),
        ("text", "A serialized topology was wanted.*got 'text'"),
        (b"\x10\x01", "`mesh_shape` must be a sequence of 4"),
    ],
)
def test_other_bytes_are_refused(serialized, text):
    with pytest.raises(ValueError, match=text):
        Topology(serialized)


def test_fields_that_are_not_known_are_passed_over():
    extra = b"\x31" + b"\0" * 8 + b"\x3d" + b"\0" * 4
    again = Topology(made().serialized() + extra)
    assert again.mesh_shape.tolist() == MESH
