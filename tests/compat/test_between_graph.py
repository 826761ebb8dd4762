"""Asynchronous training in which each worker runs the whole program."""

import copy
import threading

import jax
import numpy as np
import pytest
from helpers.served import servers_of

import jaxstrategy as js
from jaxstrategy.compat import v1

BetweenGraphStrategy = js.compat.v1.experimental.ParameterServerStrategy


@pytest.fixture
def cluster(monkeypatch):
    """Two parameter servers in this process, and a worker's strategy by its number."""
    monkeypatch.setenv("JAXSTRATEGY_CLUSTER_SECRET", "a secret of enough characters")
    with servers_of(workers=3) as tasks:
        spec = js.cluster_resolver.ClusterSpec(tasks)

        def strategy(index):
            resolver = js.cluster_resolver.SimpleClusterResolver(
                spec, task_type="worker", task_id=index
            )
            return BetweenGraphStrategy(resolver)

        yield strategy


def variables_of(strategy):
    with strategy.scope():
        return [
            js.Variable(10.0, aggregation="sum", name="x"),
            js.Variable(20.0, aggregation="sum", name="y"),
            js.Variable(30.0, aggregation="only_first_replica", name="z"),
        ]


def test_each_worker_adds_to_what_all_have(cluster):
    strategies = [cluster(index) for index in range(3)]
    of_each = [variables_of(strategy) for strategy in strategies]
    for strategy, variables in zip(strategies, of_each, strict=True):

        def step(variables=variables):
            for v in variables:
                v.assign_add(1.0)

        strategy.run(step)
    for variables in of_each:
        assert [float(v) for v in variables] == [13.0, 23.0, 33.0]
    assert {v.device for v in of_each[0]} == {v.device for v in of_each[2]}


def test_the_others_wait_for_the_chief(cluster):
    chief, other = cluster(0), cluster(1)
    made = []

    def make():
        with other.scope():
            made.append(js.Variable(99.0))

    thread = threading.Thread(target=make)
    thread.start()
    with chief.scope():
        own = js.Variable(1.0)
    thread.join(60)
    assert float(made[0]) == float(own) == 1.0


def test_who_saves_and_which_data_it_reads(cluster):
    chief, other = cluster(0), cluster(1)
    for strategy, is_chief in ((chief, True), (other, False)):
        extended = strategy.extended
        assert extended.should_checkpoint is is_chief
        assert extended.should_save_summary is is_chief
        assert extended.experimental_should_init is is_chief
        assert extended.experimental_between_graph
    seen = []

    def dataset_fn(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id))
        return [np.zeros(1, "float32")]

    next(iter(other.distribute_datasets_from_function(dataset_fn)))
    assert seen[0] == (3, 1)


def test_the_methods_of_tensorflow_1_on_servers(cluster):
    s = cluster(0)
    assert type(s) is v1.experimental.ParameterServerStrategy
    assert isinstance(s, v1.Strategy)
    with s.scope() as scope:
        assert scope is s is v1.get_strategy()
        b, a = js.Variable(1.0, name="b"), js.Variable(5.0, name="a")
    extended = s.extended
    assert (
        isinstance(extended.read_var(a), jax.Array) and float(extended.read_var(a)) == 5
    )
    assert extended.non_slot_devices([b, a]) is a
    with pytest.raises(ValueError, match="`extended.non_slot_devices` was given no"):
        extended.non_slot_devices([])
    with pytest.raises(TypeError, match="`extended.update` was given 3, a int"):
        extended.update(3, lambda v: v)
    other = "/job:worker/task:1/device:CPU:0"
    told = "Cannot reduce to another worker, .*: '/job:worker/task:1.* task 0 of job"
    with pytest.raises(ValueError, match=told):
        extended.reduce_to("sum", 1.0, other)
    with pytest.raises(ValueError, match=told):
        extended.batch_reduce_to("sum", [(1.0, ["CPU:0", other])])
    own = "/job:worker/task:0/device:CPU:0"
    assert float(extended.reduce_to("sum", 1.0, own)) == 1
    assert float(extended.update(b, lambda v, x: v.assign_add(x), args=(2.0,))) == 3
    extended.update_non_slot(a, lambda: (a.assign_add(1.0), b.assign_add(1.0)))
    assert (float(a), float(b)) == (6, 4)
    assert extended.broadcast_to(2.0, b) == 2.0
    assert float(extended.broadcast_to(np.float32(2), b)) == 2
    assert float(s.reduce("sum", 3.0)) == 3

    def step(x):
        def merge_fn(strategy, x):
            assert strategy is s
            strategy.extended.update(b, lambda b, x: b.assign_add(x), args=(x,))

        v1.get_replica_context().merge_call(merge_fn, args=(x,))

    extended.call_for_each_replica(step, args=(np.float32(3),))
    assert float(extended.read_var(b)) == 7
    twin = copy.deepcopy(s)
    assert type(twin) is type(s) and twin.extended.should_checkpoint


def test_the_cluster_must_be_one():
    def resolver(spec, **task):
        return js.cluster_resolver.SimpleClusterResolver(
            js.cluster_resolver.ClusterSpec(spec), **task
        )

    with pytest.raises(ValueError, match="without task type and id"):
        BetweenGraphStrategy(resolver({"worker": ["a:1"], "ps": ["b:1"]}))
    with pytest.raises(ValueError, match="needs to have `ps` jobs"):
        BetweenGraphStrategy(
            resolver({"worker": ["a:1"]}, task_type="worker", task_id=0)
        )


def test_without_a_cluster_variables_are_in_the_hosts_memory(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    js.simulate(8)
    strategy = BetweenGraphStrategy()
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        x = js.Variable(10.0, aggregation="sum")
    strategy.run(lambda: (x.assign_add(3.0), None)[1])
    assert float(x) == 10.0 + 3 * n
    assert len(x.devices) == 1
    assert strategy.extended.should_checkpoint


def test_iterators_and_steps_over_them(cluster):
    strategy = cluster(1)  # the second worker of three
    with cluster(0).scope():  # the chief makes the variable
        js.Variable(0.0, name="w")
    with strategy.scope():
        w = js.Variable(0.0, name="w")

    def input_fn(context):
        rows = strategy.experimental_make_numpy_dataset(np.arange(12.0))
        return rows.shard(context.num_input_pipelines, context.input_pipeline_id)

    def step(context, x):
        w.assign_add(x)
        context.set_last_step_output("x", x, "mean")
        return x

    def fn(context, x):
        strategy.run(step, (context, x))

    iterator = strategy.make_input_fn_iterator(input_fn)
    run = strategy.extended.experimental_run_steps_on_iterator
    context = run(fn, iterator, 2)
    # Each worker takes steps of its own, over the second of three shards: 1, 4, 7, 10.
    assert float(context.last_step_outputs["x"]) == 4
    assert float(w) == 5
    batches = strategy.make_dataset_iterator(js.batches(np.arange(4.0), 4))
    assert float(strategy.experimental_run(lambda x: x.sum(), batches)) == 6
