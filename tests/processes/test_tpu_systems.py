"""A TPU's devices, coordinates and hosts, as JAX and the environment tell them."""

import copy
import os
import re
import warnings
from types import SimpleNamespace

import jax
import pytest

import jaxstrategy as js
from jaxstrategy.cluster_resolver import TPUClusterResolver
from jaxstrategy.tpu.experimental import (
    DeviceAssignment,
    TPUSystemMetadata,
    initialize_tpu_system,
    shutdown_tpu_system,
)


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch):
    for name in os.environ:
        if name.startswith(("TPU_", "MEGASCALE_", "JAXSTRATEGY_", "TF_CONFIG")):
            monkeypatch.delenv(name)
    yield
    with warnings.catch_warnings():  # as at the beginning of a program
        warnings.simplefilter("ignore")
        shutdown_tpu_system()
        shutdown_tpu_system(TPUClusterResolver("local"))


def tpu(id, coords, core=0, process=0, **more):
    return SimpleNamespace(
        id=id, coords=coords, core_on_chip=core, process_index=process, **more
    )


@pytest.fixture
def topology_of(monkeypatch):
    """The topology of a system that has these devices."""

    def found(devices):
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it was initialized before
            patch.setattr(jax, "local_devices", lambda: devices)
            return initialize_tpu_system(TPUClusterResolver("local"))

    return found


def test_any_platform_has_a_topology_and_is_initialized_once():
    first = initialize_tpu_system()
    assert first.mesh_shape.tolist() == [8, 1, 1, 1]
    wanted = [[[x, 0, 0, 0] for x in range(8)]]
    assert first.device_coordinates.tolist() == wanted
    pairs = DeviceAssignment.build(first, [2, 1, 1, 1], num_replicas=4)
    assert pairs.core_assignment[..., 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.warns(RuntimeWarning, match="has already been initialized") as caught:
        second = initialize_tpu_system()
    assert caught[0].filename == __file__
    assert second.serialized() == first.serialized()
    with pytest.warns(RuntimeWarning, match="'local' was to be shut down and has not"):
        shutdown_tpu_system(TPUClusterResolver("local"))
    initialize_tpu_system(TPUClusterResolver("local"))  # another one
    shutdown_tpu_system()
    assert initialize_tpu_system().serialized() == first.serialized()
    other = js.cluster_resolver.SimpleClusterResolver({"worker": ["a:1"]})
    for function in initialize_tpu_system, shutdown_tpu_system:
        with pytest.raises(TypeError, match="A `TPUClusterResolver` was wanted.*Simpl"):
            function(other)


def test_tpus_have_their_own_coordinates(topology_of):
    chips = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    devices = [
        tpu(2 * n + core, chip, core) for n, chip in enumerate(chips) for core in (0, 1)
    ]
    found = topology_of(devices[::-1])
    assert found.mesh_shape.tolist() == [2, 2, 1, 2] and found.num_tasks == 1
    assert found.tpu_device_ordinal_at_coordinates([1, 0, 0, 1]) == 3
    found = topology_of([tpu(0, [2, 3, 1]), tpu(1, [3, 3, 1])])  # a part begins at 0
    assert found.mesh_shape.tolist() == [2, 1, 1, 1]
    assert found.device_coordinates[0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]


def test_processes_are_tasks_and_slices_lie_above_each_other(topology_of):
    devices = [
        tpu(4 * process + n, [2 * process + n % 2, n // 2, 0], process=process)
        for process in (0, 1)
        for n in range(4)
    ]
    found = topology_of(devices)
    assert found.mesh_shape.tolist() == [4, 2, 1, 1]
    assert found.num_tasks == 2 and found.num_tpus_per_task == 4
    assert found.task_ordinal_at_coordinates([3, 1, 0, 0]) == 1
    assert found.tpu_device_ordinal_at_coordinates([3, 1, 0, 0]) == 3
    with pytest.raises(ValueError, match="as many devices in each.*these have 4, 3"):
        topology_of(devices[:-1])
    devices = [
        tpu(2 * part + n, [n, 0, 0], process=part, slice_index=part)
        for part in range(3)
        for n in range(2)
    ]
    found = topology_of(devices)
    assert found.mesh_shape.tolist() == [2, 1, 3, 1]
    assert found.task_ordinal_at_coordinates([1, 0, 2, 0]) == 2


def test_a_local_tpu_is_this_host_with_what_there_is(monkeypatch):
    resolver = TPUClusterResolver("local")
    assert resolver.cluster_spec().as_dict() == {} and resolver.master() == ""
    assert resolver.get_master() == "" and resolver.environment == ""
    assert resolver.task_type == resolver.get_job_name() == "worker"
    assert resolver.task_id == 0 and resolver.tpu == "local"
    assert resolver.get_coordination_service_leader() == "/job:worker/task:0"
    assert resolver.process() == js.cluster_resolver.Process(0, 1, "")
    assert resolver.num_accelerators() == {"TPU": 0}
    assert repr(resolver) == "TPUClusterResolver('local')"
    with resolver as entered:
        assert entered is resolver
    assert copy.deepcopy(resolver) is resolver
    for name in None, "", "local":
        found = TPUClusterResolver(name).get_tpu_system_metadata()
        assert found == TPUSystemMetadata(8, 1, 8, None, jax.devices())
    devices = [SimpleNamespace(platform="tpu", process_index=0, id=i) for i in range(4)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert TPUClusterResolver("local").num_accelerators() == {"TPU": 4}


def test_hosts_of_the_environment(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a, b,c")
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    resolver = TPUClusterResolver()
    hosts = ["a:8476", "b:8476", "c:8476"]
    assert resolver.cluster_spec().as_dict() == {"worker": hosts}
    assert resolver.process() == js.cluster_resolver.Process(2, 3, "a:8476")
    assert resolver.task_id == 2 and resolver.master() == "grpc://c:8476"
    assert resolver.master("worker", 1) == "grpc://b:8476"
    assert TPUClusterResolver("local").cluster_spec().as_dict() == {}
    monkeypatch.delenv("TPU_WORKER_ID")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")  # one needs no number
    alone = TPUClusterResolver("").process()
    assert alone == js.cluster_resolver.Process(0, 1, "localhost:8476")


def test_a_coordinator_is_a_job_beside(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    resolver = TPUClusterResolver(
        job_name="tpu_worker", coordinator_name="coordinator", coordinator_address="z:1"
    )
    assert resolver.cluster_spec().as_dict() == {
        "tpu_worker": ["a:8476", "b:8476"],
        "coordinator": ["z:1"],
    }
    assert resolver.process().count == 2 and resolver.task_type == "tpu_worker"
    with pytest.raises(ValueError, match="without a `coordinator_address`"):
        TPUClusterResolver(coordinator_name="coordinator")


def test_malformed_numbers_of_hosts_are_refused(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    for number in None, "", "2", "-1", "x":
        if number is not None:
            monkeypatch.setenv("TPU_WORKER_ID", number)
        text = f"TPU_WORKER_ID is {number or ''!r} and TPU_WORKER_HOSTNAMES has 2 hosts"
        for ask in (TPUClusterResolver().cluster_spec, TPUClusterResolver().process):
            with pytest.raises(ValueError, match=re.escape(text)):
                ask()


def test_launchers_are_asked_first(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    config = '{"cluster": {"chief": ["c:1"], "worker": ["d:1"]}, "task": {"type": '
    monkeypatch.setenv("TF_CONFIG", config + '"worker", "index": 0}}')
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["c:1", "d:1"]}
    assert resolver.process() == js.cluster_resolver.Process(1, 2, "c:1")
    assert resolver.task_id == 1


def test_hosts_of_several_slices_are_jaxs_to_find(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "a:1")
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec().as_dict() == {}
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    assert resolver.process() == js.cluster_resolver.Process(3, 4, "process-0:0")


def test_a_tpu_goes_by_the_name_that_the_environment_has(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "mine")
    assert TPUClusterResolver("mine", zone="z", project="p").tpu == "mine"
    assert TPUClusterResolver().tpu == "mine"
    text = (
        "`tpu` was 'other', and this program does not know to run on a TPU of that "
        "name: TPU_NAME in the environment is 'mine'"
    )
    for make in (TPUClusterResolver, TPUClusterResolver.connect):
        with pytest.raises(ValueError, match=text):
            make("other")
    with pytest.raises(ValueError, match=r"Start this program on each host \(`gcloud"):
        TPUClusterResolver("grpc://10.240.1.2:8470")
    with pytest.raises(TypeError, match="`tpu` was 3; the name of a TPU"):
        TPUClusterResolver(3)
