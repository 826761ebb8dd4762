"""Values of 2018: `broadcast`, `reduce`, `unwrap`, `group`, `map`, `fetch`."""

import json
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.replicas import ids
from helpers.towers import STRATEGIES, in_default, mirrored, unwrapped

import jaxstrategy as js
from jaxstrategy.compat import contrib
from jaxstrategy.compat.contrib import VariableAggregation
from jaxstrategy.parameter_servers.backends._served_task import ServedTask

SUM, MEAN = VariableAggregation.SUM, VariableAggregation.MEAN


@pytest.fixture
def d():
    return mirrored(2)


def devices(value):
    return sorted(device.id for device in value.devices())


# Reduce.


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 3.0), (MEAN, 1.5)])
def test_reduce(d, aggregation, expected):
    with d.scope():
        x = ids(d.core, 1.0)
        assert unwrapped(d, d.reduce(aggregation, x)) == [expected] * 2
        assert unwrapped(d, d.reduce(aggregation.name.lower(), x)) == [expected] * 2
        on_one = d.reduce(aggregation, x, destinations="CPU:0")
        assert devices(on_one) == [0] and unwrapped(d, on_one) == [expected]
        on_two = d.reduce(aggregation, x, ["CPU:2", "CPU:3"])
        assert devices(on_two) == [2, 3] and float(on_two) == expected
        v = js.Variable(7.0)
        at = d.reduce(aggregation, x, destinations=v)
        assert devices(at) == [0, 1] and unwrapped(d, at) == [expected] * 2
        assert v == 7.0


def test_reduce_over_four():
    d = mirrored(4)
    with d.scope():
        x = {"a": ids(d.core, 1.0), "b": [ids(d.core)]}
        assert unwrapped(d, d.reduce(SUM, x)["a"]) == [10.0] * 4
        assert unwrapped(d, d.reduce(MEAN, x)["b"][0]) == [1.5] * 4


@pytest.mark.parametrize(
    "aggregation",
    [
        VariableAggregation.NONE,
        VariableAggregation.ONLY_FIRST_REPLICA,
        "max",
        js.ReduceOp.MAX,
        "total",
        None,
    ],
)
def test_other_aggregations_are_refused(d, aggregation):
    words = "`aggregation` was .*; `VariableAggregation.SUM` or `VariableAggregation.M"

    def uses(d):
        with pytest.raises(ValueError, match=words):
            d.reduce(aggregation, 1.0)
        with pytest.raises(ValueError, match=words):
            d.batch_reduce(aggregation, [(1.0, None)])

    in_default(uses)
    with d.scope():
        uses(d)


def test_batch_reduce(d):
    with d.scope():
        v, t = js.Variable(7.0), ids(d.core, 1.0)
        twice = d.core.run(lambda t: 2 * t, (t,))
        results = d.batch_reduce(SUM, [(t, v), (twice, v)])
        assert isinstance(results, list)
        assert [unwrapped(d, x) for x in results] == [[3.0, 3.0], [6.0, 6.0]]
        assert [float(d.reduce(SUM, x, v)) for x in (t, twice)] == [3.0, 6.0]
        assert v == 7.0
        (alone,) = d.batch_reduce(MEAN, [(t, None)])
        assert unwrapped(d, alone) == [1.5, 1.5]
        with pytest.raises(ValueError, match="should be a tuple of a value"):
            d.batch_reduce(SUM, [t])


def test_reduce_in_a_merge_function(d):
    def merge_fn(d, x):
        total = d.reduce(SUM, x, destinations="CPU:0")
        means = d.batch_reduce(MEAN, [(x, None), (x, x)])
        return total, means

    def fn():
        context = contrib.get_tower_context()
        return context.merge_call(merge_fn, jnp.float32(context.tower_id) + 1)

    with d.scope():
        total, means = d.call_for_each_tower(fn)
        assert unwrapped(d, total) == [3.0, 3.0]
        assert [unwrapped(d, x) for x in means] == [[1.5, 1.5]] * 2


@pytest.mark.parametrize(
    "ops",
    [
        contrib.ReductionToOneDeviceCrossTowerOps(),
        contrib.ReductionToOneDeviceCrossTowerOps("CPU:1", accumulation_fn=sum),
        contrib.AllReduceCrossTowerOps(),
        contrib.AllReduceCrossTowerOps("hierarchical_copy", num_packs=2),
        contrib.AllReduceCrossTowerOps("nccl", 0, 10, 10),
    ],
    ids=["one device", "device 1", "all-reduce", "hierarchical", "aggregated"],
)
def test_cross_tower_ops_change_no_sum(ops):
    assert isinstance(ops, contrib.CrossTowerOps)
    d = contrib.MirroredStrategy(jax.devices()[:4], cross_tower_ops=ops)
    with d.scope():
        assert unwrapped(d, d.reduce(SUM, ids(d.core, 1.0))) == [10.0] * 4
        assert unwrapped(d, d.reduce(MEAN, ids(d.core, 1.0))) == [2.5] * 4


def test_cross_tower_ops_that_there_are_not():
    with pytest.raises(ValueError, match="`all_reduce_alg` was 'ring'; 'nccl' or 'hie"):
        contrib.AllReduceCrossTowerOps("ring")
    with pytest.raises(TypeError, match="`num_packs` was 'a'"):
        contrib.AllReduceCrossTowerOps(num_packs="a")


# Broadcast.


def test_broadcast(d):
    with d.scope():
        everywhere = d.broadcast(5.0)
        assert devices(everywhere) == [0, 1] and unwrapped(d, everywhere) == [5.0, 5.0]
        with d.colocate_vars_with(["CPU:1"]):
            v = js.Variable(1.0)
        there = d.broadcast(5.0, v)
        assert devices(there) == [1] and float(there) == 5.0 and v == 1.0
        assert devices(d.broadcast(np.arange(2.0), "CPU:1")) == [1]
        assert devices(d.broadcast({"a": 1}, ["CPU:3", "CPU:4"])["a"]) == [3, 4]
        with pytest.raises(TypeError, match="device"):
            d.broadcast(5.0, 3.5)


def test_broadcast_to_one_device():
    d = contrib.OneDeviceStrategy("CPU:1")
    with d.scope():
        assert float(d.broadcast(5.0)) == 5.0


def test_broadcast_in_a_merge_function(d):
    def fn():
        def merge_fn(d):
            return d.broadcast(5.0), d.broadcast(jnp.arange(2.0), "CPU:1")

        return contrib.get_tower_context().merge_call(merge_fn)

    with d.scope():
        five, numbers = d.call_for_each_tower(fn)
        assert five == 5.0
        assert unwrapped(d, numbers) == [[0.0, 1.0]] * 2


# Unwrap and group.


def test_unwrap(d):
    with d.scope():
        x = ids(d.core, 1.0)
        assert d.unwrap(3) == [3] and d.unwrap("x") == ["x"]
        assert unwrapped(d, x) == [1.0, 2.0]
        assert unwrapped(d, js.Variable(2.0)) == [2.0, 2.0]
        assert sum(d.unwrap(x)) == 3.0
        parts = d.unwrap({"a": x, "b": 1})
        assert [(float(p["a"]), p["b"]) for p in parts] == [(1.0, 1), (2.0, 1)]
        plain = jnp.float32(3.0)
        assert d.unwrap(plain)[0] is plain and len(d.unwrap(plain)) == 1


def test_unwrap_of_one_tower():
    for name in ("mirrored-1", "one-device"):
        d = STRATEGIES[name]()
        with d.scope():
            assert unwrapped(d, d.core.mirror(3.0)) == [3.0]
            assert unwrapped(d, js.Variable(3.0)) == [3.0]


def test_group(d):
    with d.scope():
        x = ids(d.core, 1.0)
        assert d.group(x) is None and d.group({"a": x, "b": x}) is None
        assert d.group(3.0) == 3.0 and d.group(3.0, name="train") is None
        assert d.group(x, name="train") is None
        assert d.group(d.core.mirror(3.0)) is None


def test_group_in_a_merge_function(d):
    def fn():
        def merge_fn(d, x):
            assert d.group(x) is None
            return d.group(7)

        return contrib.get_tower_context().merge_call(merge_fn, jnp.float32(1.0))

    with d.scope():
        assert d.call_for_each_tower(fn) == 7


def test_group_waits():
    d = contrib.OneDeviceStrategy("CPU:0")
    with d.scope():
        x = d.call_for_each_tower(lambda: jnp.full((), 2.0) ** 3)
        assert d.group(x) is x and x.is_ready()


def test_value_containers(d):
    with d.scope():
        v = js.Variable(1.0)
        first, _ = d.unwrap(v)
        assert d.value_container(v) is v and d.value_container(first) is v
        x = ids(d.core)
        assert d.value_container(x) is x and d.value_container(3.0) == 3.0


# Map and fetch, of early 2018.


@pytest.mark.parametrize("n", [1, 2, 4])
def test_map_and_reduce(n):
    d = mirrored(n)
    with d.scope():
        found = d.map(range(10), lambda x, y: x * y, 2)
        total = d.reduce(SUM, found)
        assert devices(total) == list(range(n)) and unwrapped(d, total) == [90] * n
        assert unwrapped(d, d.reduce("mean", found, "CPU:1")) == [9.0]
        of_towers = [[2 * i for i in range(10) if i % n == tower] for tower in range(n)]
        assert d.unwrap(found) == of_towers
        assert repr(found) == f"MapOutput(10 elements on {n} towers)"


def test_map_of_the_default_strategy():
    def merge_fn(d):
        return d.reduce(SUM, d.map(range(10), lambda x, y: {"a": x * y}, y=2))

    assert in_default(merge_fn) == {"a": 90}


def test_map_of_nothing(d):
    with d.scope():
        with pytest.raises(ValueError, match="`map` was given no elements"):
            d.reduce(SUM, d.map([], lambda x: x))
        with pytest.raises(TypeError, match="`map` was given 3, which cannot be call"):
            d.map([], 3)


def test_fetch(d):
    with d.scope():
        v = js.Variable(3.0)
        assert d.fetch(v) == 3.0 and d.fetch(v, fn=lambda x: 2 * x) == 6.0
        there = d.fetch(v, destination="CPU:0", fn=lambda x: x + 1)
        assert devices(there) == [0] and there == 4.0
        assert d.fetch(5.0) == 5.0
        with pytest.raises(TypeError, match="`fetch` was given 3, which cannot be"):
            d.fetch(v, fn=3)


# Construction.


def test_a_number_of_devices():
    for name in ("num_gpus", "num_gpus_per_worker"):
        d = contrib.MirroredStrategy(**{name: 2})
        assert d.worker_devices == jax.devices()[:2]
    assert contrib.MirroredStrategy().num_towers == 8
    with pytest.raises(
        ValueError, match="Must only specify one of `devices` and `num_gpus`."
    ):
        contrib.MirroredStrategy(["CPU:0"], num_gpus=1)
    with pytest.raises(ValueError, match="one of `num_gpus` and `num_gpus_per_worker`"):
        contrib.MirroredStrategy(num_gpus=1, num_gpus_per_worker=1)
    with pytest.raises(ValueError, match=r"`num_gpus` was 9, but this host has 8 dev"):
        contrib.MirroredStrategy(num_gpus=9)
    with pytest.raises(ValueError, match="`num_gpus` was 0; 1 or more was wanted"):
        contrib.MirroredStrategy(num_gpus=0)
    with pytest.raises(TypeError, match="`num_gpus` was 1.5; a whole number was wan"):
        contrib.MirroredStrategy(num_gpus=1.5)


def test_parameter_servers_of_one_process(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    d = contrib.ParameterServerStrategy(num_gpus_per_worker=2)
    assert d.num_towers == 2 and d.parameter_devices == jax.devices()[:1]
    assert contrib.ParameterServerStrategy().is_single_tower
    with d.scope():
        v = js.Variable(0.0, aggregation="sum")
        total = d.call_for_each_tower(lambda x: v.assign_add(x), ids(d.core, 1.0))
        assert float(total) == 3.0 and v == 3.0


def test_several_processes_with_one(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["localhost:2222"]}}')
    d = contrib.CollectiveAllReduceStrategy(num_gpus_per_worker=8)
    assert d.num_towers == 8
    assert type(d.core) is js.MultiWorkerMirroredStrategy
    with pytest.raises(ValueError, match="was 2, but this process has 8 devices"):
        contrib.CollectiveAllReduceStrategy(2)
    with pytest.raises(ValueError, match="`num_gpus_per_worker` was -1; 0 or more"):
        contrib.CollectiveAllReduceStrategy(-1)


def test_cores():
    d = contrib.TPUStrategy(steps_per_run=3, num_cores=8)
    assert d.num_towers == 8 and d.steps_per_run == 3
    with pytest.raises(ValueError, match="`num_cores` was 4, but the system has 8"):
        contrib.TPUStrategy(num_cores=4)
    with pytest.raises(ValueError, match="`steps_per_run` was 0; 1 or more"):
        contrib.TPUStrategy(steps_per_run=0)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("MultiWorkerAllReduce", "HierarchicalCopyAllReduce"),
        ("DistributeConfig", "training_loop"),
        ("run_standard_tensorflow_server", "Server"),
        ("get_replica_context", "get_tower_context"),
    ],
)
def test_names_that_are_not_here_say_what_to_use(name, advice):
    with pytest.raises(
        AttributeError, match=f"{name}.*, which TensorFlow has.*{advice}"
    ):
        getattr(contrib, name)


def test_names_that_nobody_has():
    name = "foo"
    with pytest.raises(AttributeError, match="has no attribute 'foo'$"):
        getattr(contrib, name)


@pytest.fixture
def cluster(monkeypatch):
    """Two parameter servers in this process, which is one of two workers."""
    monkeypatch.setenv("JAXSTRATEGY_CLUSTER_SECRET", "a secret of enough characters")
    tasks = {
        job: [f"127.0.0.1:{free_port()}" for _ in range(2)] for job in ("worker", "ps")
    }
    spec = js.cluster_resolver.ClusterSpec(tasks)
    servers = [ServedTask(spec, "ps", index) for index in range(2)]
    for server in servers:
        server.start()
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": tasks, "task": task}))
    yield
    for server in servers:
        server.close()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_parameter_servers_of_a_cluster(cluster):
    d = contrib.ParameterServerStrategy(num_gpus_per_worker=8)
    n = d.num_towers
    with d.scope():
        assert contrib.get_cross_tower_context() is d
        v = contrib.get_variable("v", [], initializer=np.ones, aggregation="sum")

        def model_fn(x):
            v = contrib.get_variable("v", [], initializer=np.ones, aggregation="sum")
            v.assign_add(x)

        d.call_for_each_tower(model_fn, 2.0)
        assert float(d.read_var(v)) == 1 + 2 * n
        assert d.non_slot_devices([v]) is v
    with pytest.raises(ValueError, match="was 3, but this process has 8 devices"):
        contrib.ParameterServerStrategy(3)
