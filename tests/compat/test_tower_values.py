"""Values and variables of 2018: what `broadcast`, `reduce`, `update`, `read_var` do."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.replicas import ids
from helpers.served import servers_of
from helpers.towers import STRATEGIES, in_default, mirrored, unwrapped

import jaxstrategy as js
from jaxstrategy.compat import contrib
from jaxstrategy.compat.contrib import VariableAggregation

SUM, MEAN = VariableAggregation.SUM, VariableAggregation.MEAN


@pytest.fixture
def d():
    return mirrored(2)


def devices(value):
    return sorted(device.id for device in value.devices())


def test_reduce(d):
    for aggregation, expected in [(SUM, 3.0), (MEAN, 1.5)]:
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


def test_other_aggregations_are_refused(d):
    words = "`aggregation` was .*; `VariableAggregation.SUM` or `VariableAggregation.M"

    def uses(d):
        for aggregation in [
            VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA, "max",
            js.ReduceOp.MAX, "total", None,
        ]:  # fmt: skip
            with pytest.raises(ValueError, match=words):
                d.reduce(aggregation, 1.0)
            with pytest.raises(ValueError, match=words):
                d.batch_reduce(aggregation, [(1.0, None)])

    in_default(uses)
    with d.scope():
        uses(d)


def test_cross_tower_ops_change_no_sum():
    for ops in [
        contrib.ReductionToOneDeviceCrossTowerOps(),
        contrib.ReductionToOneDeviceCrossTowerOps("CPU:1", accumulation_fn=sum),
        contrib.AllReduceCrossTowerOps(),
        contrib.AllReduceCrossTowerOps("hierarchical_copy", num_packs=2),
        contrib.AllReduceCrossTowerOps("nccl", 0, 10, 10),
    ]:
        assert isinstance(ops, contrib.CrossTowerOps)
        d = contrib.MirroredStrategy(jax.devices()[:4], cross_tower_ops=ops)
        with d.scope():
            assert unwrapped(d, d.reduce(SUM, ids(d.core, 1.0))) == [10.0] * 4
            assert unwrapped(d, d.reduce(MEAN, ids(d.core, 1.0))) == [2.5] * 4


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


def test_map_and_reduce():
    for n in [1, 2]:
        d = mirrored(n)
        with d.scope():
            found = d.map(range(10), lambda x, y: x * y, 2)
            total = d.reduce(SUM, found)
            assert devices(total) == list(range(n)) and unwrapped(d, total) == [90] * n
            assert unwrapped(d, d.reduce("mean", found, "CPU:1")) == [9.0]
            of_towers = [
                [2 * i for i in range(10) if i % n == tower] for tower in range(n)
            ]
            assert d.unwrap(found) == of_towers
            assert repr(found) == f"MapOutput(10 elements on {n} towers)"


def test_strategies_of_one_process(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    d = contrib.ParameterServerStrategy(num_gpus_per_worker=2)
    assert d.num_towers == 2 and d.parameter_devices == jax.devices()[:1]
    assert contrib.ParameterServerStrategy().is_single_tower
    with d.scope():
        v = js.Variable(0.0, aggregation="sum")
        total = d.call_for_each_tower(lambda x: v.assign_add(x), ids(d.core, 1.0))
        assert float(total) == 3.0 and v == 3.0
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["localhost:2222"]}}')
    d = contrib.CollectiveAllReduceStrategy(num_gpus_per_worker=8)
    assert d.num_towers == 8
    assert type(d.core) is js.MultiWorkerMirroredStrategy
    with pytest.raises(ValueError, match="was 2, but this process has 8 devices"):
        contrib.CollectiveAllReduceStrategy(2)
    with pytest.raises(ValueError, match="`num_gpus_per_worker` was -1; 0 or more"):
        contrib.CollectiveAllReduceStrategy(-1)


def test_names_that_are_not_here_say_what_to_use():
    for name, advice in [
        ("MultiWorkerAllReduce", "HierarchicalCopyAllReduce"),
        ("DistributeConfig", "training_loop"),
        ("run_standard_tensorflow_server", "Server"),
        ("get_replica_context", "get_tower_context"),
    ]:
        told = f"{name}.*, which TensorFlow has.*{advice}"
        with pytest.raises(AttributeError, match=told):
            getattr(contrib, name)


@pytest.fixture
def cluster(monkeypatch):
    """Two parameter servers in this process, which is one of two workers."""
    monkeypatch.setenv("JAXSTRATEGY_CLUSTER_SECRET", "a secret of enough characters")
    task = {"type": "worker", "index": 0}
    with servers_of(workers=2) as tasks:
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": tasks, "task": task}))
        yield


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


# `update`, `update_non_slot`, `read_var`, tower-local variables.


@pytest.fixture(params=STRATEGIES)
def any_strategy(request):
    return STRATEGIES[request.param]()


def test_update(any_strategy):
    d = any_strategy
    with d.scope():
        v = js.Variable(1.0)
        new = d.update(v, lambda v, a, b=0: v.assign_add(a + b), 2.0, b=3.0)
        assert float(new) == 6.0 and unwrapped(d, v) == [6.0] * d.num_towers
        assert d.update(v, lambda v: v) is v
        assert d.update(v, lambda v: 3, grouped=False) == (3,)


def test_arguments_that_differ_between_towers_are_refused(d):
    for method in ["update", "update_non_slot"]:
        with d.scope():
            v = js.Variable(1.0)
            where = v if method == "update" else d.non_slot_devices([v])
            for args, named in [((ids(d.core),), {}), ((), {"g": {"x": ids(d.core)}})]:
                with pytest.raises(TypeError, match=f"`{method}` was given a PerDevic"):
                    getattr(d, method)(where, lambda *_, **__: None, *args, **named)
            with pytest.raises(TypeError, match=f"`{method}` was given 3, which canno"):
                getattr(d, method)(where, 3)


def test_update_non_slot(any_strategy):
    d = any_strategy
    n = d.num_towers
    with d.scope():
        v, power = js.Variable(1.0), js.Variable(0.5)
        where = d.non_slot_devices([v])
        assert isinstance(where, list) and len(where) == n
        assert d.update_non_slot(where, lambda a: a + 1, 2.0) == 3.0
        new = d.update_non_slot(where, lambda by: power.assign_add(by), by=1.0)
        assert float(new) == 1.5 and unwrapped(d, power) == [1.5] * n
        copies = d.update_non_slot(where, lambda: power.assign(2.0), grouped=False)
        assert [float(copy) for copy in copies] == [2.0] * n


def test_non_slot_devices_of_the_default_strategy():
    a, b = js.Variable(1.0, name="a"), js.Variable(2.0, name="b")
    d = contrib.get_distribution_strategy()
    assert d.non_slot_devices([b, a]) is a
    with pytest.raises(ValueError, match="`non_slot_devices` was given no variables"):
        d.non_slot_devices([])
    with pytest.raises(TypeError, match="was given .3, 4.; a list of variables was"):
        d.non_slot_devices([3, 4])

    def merge_fn(d):
        where = d.non_slot_devices([b, a])
        return d.update_non_slot(where, lambda by: b.assign_add(by), 1.0)

    assert in_default(merge_fn) == 3.0 and b == 3.0 and a == 1.0


def test_update_contexts_are_nested_and_of_their_thread(d):
    found = []
    cpu = jax.devices()
    with contrib.UpdateContext("CPU:1") as outer:
        assert outer.devices == (cpu[1],)
        assert contrib.get_update_device() == (cpu[1],)
        with pytest.raises(KeyError), contrib.UpdateContext([cpu[2], "CPU:3"]):
            assert contrib.get_update_device() == (cpu[2], cpu[3])
            raise KeyError
        assert contrib.get_update_device() == (cpu[1],)
        thread = threading.Thread(
            target=lambda: found.append(contrib.get_update_device())
        )
        thread.start()
        thread.join()
        with d.scope():
            v = js.Variable(1.0)
            inner = d.update(v, lambda v: [contrib.get_update_device()])
            assert inner == [(cpu[0], cpu[1])]
            v.assign(2.0)  # of all copies, as elsewhere
            assert unwrapped(d, v) == [2.0, 2.0]
        with outer:
            assert contrib.get_update_device() == (cpu[1],)
    assert found == [None] and contrib.get_update_device() is None
    with pytest.raises(TypeError, match="device"):
        contrib.UpdateContext(3.5)


def test_read_var(any_strategy):
    d = any_strategy
    n = d.num_towers
    with d.scope():
        v = js.Variable(3.0)
        value = d.read_var(v)
        assert isinstance(value, jax.Array) and value == 3.0
        assert unwrapped(d, d.call_for_each_tower(lambda: d.read_var(v))) == [3.0] * n
    assert d.read_var(v) == 3.0
    assert d.read_var(js.Variable(4.0)) == 4.0
    with pytest.raises(TypeError, match="`read_var` was given 3; a jaxstrategy.Varia"):
        d.read_var(3)


def test_increment_var():
    n = 2
    d = mirrored(n)
    with d.scope():
        v = js.Variable(6)

        def fn():
            return contrib.increment_var(v)

        assert unwrapped(d, d.call_for_each_tower(fn)) == [7] * n
        assert unwrapped(d, v) == [7] * n
        with pytest.raises(RuntimeError, match="`increment_var` was called in cross-"):
            contrib.increment_var(v)
    w = js.Variable(1)
    assert contrib.increment_var(w, 3) == 4 and w == 4
    assert in_default(lambda d: d.call_for_each_tower(contrib.increment_var, w)) == 5


def test_tower_local_variables(d):
    with d.scope():
        with d.tower_local_var_scope("sum"):
            total = js.Variable(0.0)
            kept = js.Variable(0.0, synchronization="on_write")
            named = contrib.get_variable("named", [], initializer=jnp.zeros)
        with d.tower_local_var_scope(contrib.VariableAggregation.MEAN):
            mean = js.Variable(0.0)
        after = js.Variable(0.0)

        def fn():
            number = contrib.get_tower_context().tower_id
            total.assign(3.0 + number)
            mean.assign(6.0 * number)
            return total.value(), mean.value()

        own = d.call_for_each_tower(fn)
        assert [unwrapped(d, x) for x in own] == [[3.0, 4.0], [0.0, 6.0]]
        assert total == 7.0 and mean == 3.0
        assert d.read_var(total) == 7.0 and d.read_var(mean) == 3.0
        words = "`read_var` was given the tower-local variable"
        with pytest.raises(RuntimeError, match=words):
            d.call_for_each_tower(lambda: d.read_var(total))
        with pytest.raises(ValueError, match="scan"), d.tower_local_var_scope("scan"):
            pass
    on_read = js.VariableSynchronization.ON_READ
    assert total.synchronization is named.synchronization is on_read
    assert kept.synchronization is js.VariableSynchronization.ON_WRITE
    assert after.synchronization is js.VariableSynchronization.AUTO
    assert not total.trainable and after.trainable
    words = 'Need to be inside "with distribution_strategy.scope'
    with pytest.raises(RuntimeError, match=words), d.tower_local_var_scope("sum"):
        pass
