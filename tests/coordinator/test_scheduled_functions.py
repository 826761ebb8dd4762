"""Functions that a coordinator schedules: what they see, and what becomes of it."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.parameter_servers import _recently_used
from jaxstrategy.parameter_servers.backends._threads import Threads
from jaxstrategy.variables._row_functions import read_rows


class Cluster:
    """A strategy on threads, its coordinator, and one call after the other."""

    def __init__(self, workers=2, servers=2, devices=1):
        self.strategy = js.ParameterServerStrategy(
            backend=Threads(workers, servers, devices)
        )
        self.coordinator = js.coordinator.ClusterCoordinator(self.strategy)

    def variable(self, value=1.0, **options):
        with self.strategy.scope():
            return js.Variable(value, **options)

    def schedule(self, fn, *args, **kwargs):
        return self.coordinator.schedule(self.coordinator.function(fn), args, kwargs)

    def __call__(self, fn, *args, **kwargs):
        return self.schedule(fn, *args, **kwargs).fetch()


@pytest.fixture(scope="module")
def shared():
    cluster = Cluster()
    with cluster.coordinator:
        yield cluster


@pytest.fixture(scope="module")
def of_two_devices():
    cluster = Cluster(devices=2)
    with cluster.coordinator:
        yield cluster


CLUSTERS = ["shared", "of_two_devices"]


@pytest.fixture(params=CLUSTERS)
def cluster(request):
    return request.getfixturevalue(request.param)


# Contexts.


def test_it_is_in_cross_replica_context(cluster):
    seen = {}

    def function():
        seen["outside run"] = js.has_strategy(), js.get_replica_context()
        seen["strategy"] = js.get_strategy()

        def step():
            context = js.get_replica_context()
            seen["in run"] = context.num_replicas_in_sync
            return context.replica_id_in_sync_group + 0

        return cluster.strategy.reduce("sum", cluster.strategy.run(step))

    n = cluster.strategy.num_replicas_in_sync
    assert cluster(function) == sum(range(n))
    assert seen["outside run"] == (True, None)
    assert seen["strategy"] is cluster.strategy
    assert seen["in run"] == n


def test_run_and_reductions(cluster):
    strategy, n = cluster.strategy, cluster.strategy.num_replicas_in_sync

    def function(x):
        local = strategy.run(lambda: x)
        of_rows = strategy.reduce("sum", strategy.run(lambda: jnp.array([1.0, 2.0])), 0)
        total, mean = strategy.reduce("sum", local), strategy.reduce("mean", local)
        return total, mean, of_rows

    assert jax.tree.map(float, cluster(function, 3.0)) == (3.0 * n, 3.0, 3.0 * n)


def test_collectives_of_a_step(cluster):
    strategy, n = cluster.strategy, cluster.strategy.num_replicas_in_sync

    def function():
        def step():
            context = js.get_replica_context()
            return (
                context.all_reduce("sum", 3.0),
                context.all_gather(jnp.array([3.0]), 0),
                context.merge_call(
                    lambda s, x: s.run(lambda x: x + 1, (x,)), (jnp.float32(3.0),)
                ),
            )

        total, gathered, merged = strategy.run(step)
        return strategy.reduce("mean", (total, merged)), strategy.reduce(
            "mean", gathered
        )

    (total, merged), gathered = cluster(function)
    assert (float(total), float(merged)) == (3.0 * n, 4.0)
    assert gathered.tolist() == [3.0] * n


def test_inputs_and_a_variable_in_run(cluster):
    strategy, n = cluster.strategy, cluster.strategy.num_replicas_in_sync
    v = cluster.variable(1.0)

    def function():
        def step():
            return v + jnp.float32(3.0), js.get_replica_context().num_replicas_in_sync

        return strategy.reduce("sum", strategy.run(step)[0])

    assert float(cluster(function)) == 4.0 * n


# Variables.


def test_program_order_in_one_function(cluster):
    a, b = cluster.variable(1.0), cluster.variable(0.0)

    def function():
        first = a.value()
        a.assign(2 * first)
        second = a.value()
        b.assign_add(second)
        a.assign_add(b.value())
        return first, second

    assert jax.tree.map(float, cluster(function)) == (1.0, 2.0)
    assert (float(a), float(b)) == (4.0, 2.0)


def test_the_first_replica_adds_once_per_function(cluster):
    v = cluster.variable(0.0, aggregation="only_first_replica")
    function = cluster.coordinator.function(
        lambda: cluster.strategy.run(lambda: (v.assign_add(3.0), None)[1])
    )
    for _ in range(2):
        cluster.coordinator.schedule(function)
    cluster.coordinator.join()
    assert float(v) == 6.0


def test_replicas_assign_their_sum(cluster):
    n = cluster.strategy.num_replicas_in_sync
    v = cluster.variable(0.0, aggregation="sum")

    def step():
        v.assign(js.get_replica_context().replica_id_in_sync_group + 1.0)

    cluster(lambda: cluster.strategy.run(step))
    assert float(v) == sum(range(1, n + 1))


def test_extended_update_in_a_function(cluster):
    v = cluster.variable(1.0)

    def function():
        cluster.strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(2.0,))

    cluster(function)
    assert float(v) == 3.0


def test_additions_are_atomic(shared):
    v = shared.variable(np.zeros(1000, "float32"))
    function = shared.coordinator.function(
        lambda: (v.assign_add(jnp.ones(1000)), None)[1]
    )
    for _ in range(200):
        shared.coordinator.schedule(function)
    shared.coordinator.join()
    assert set(v.numpy().tolist()) == {200.0}


def test_an_update_on_the_server_is_atomic(shared):
    v = shared.variable(0.0)
    function = shared.coordinator.function(
        lambda: (v.update(lambda old: old + 1), None)[1]
    )
    for _ in range(100):
        shared.coordinator.schedule(function)
    shared.coordinator.join()
    assert float(v) == 100.0


def test_a_variable_cannot_be_made_in_it(shared):
    with pytest.raises(ValueError, match="Make it outside the step"):
        shared.schedule(lambda: js.Variable(1.0).value())
    shared.coordinator.join()


def test_results_are_visible_before_they_are_fetched(shared):
    v = shared.variable(1.0)
    seen = shared.schedule(lambda: v.assign_add(1.0))
    assert float(seen.fetch()) == float(v) == 2.0
    v.assign(50.0)
    assert float(seen.fetch()) == 2.0


def test_a_variable_that_is_returned_is_its_value_then(shared):
    v = shared.variable(3.0)
    result = shared.schedule(lambda: {"v": v.value(), "rest": (None, "x")})
    found = result.fetch()
    v.assign(4.0)
    assert float(found.pop("v")) == 3.0
    assert found == {"rest": (None, "x")}


# Tracing.


def test_it_is_traced_once_for_all_workers(shared):
    calls = []

    def function(x, y=1.0):
        calls.append(threading.current_thread())
        return x - y

    scheduled = shared.coordinator.function(function)
    results = [shared.coordinator.schedule(scheduled, (i,), {"y": 4}) for i in range(9)]
    assert [int(each.fetch()) for each in results] == [i - 4 for i in range(9)]
    assert calls == [threading.current_thread()]


def test_static_arguments_are_part_of_the_program(shared):
    def function(x, kind, flag):
        return (x + 1 if flag else x), kind

    assert shared(function, 1.0, "a", True) == (2.0, "a")
    assert shared(function, 1.0, "b", False) == (1.0, "b")


def test_what_a_closure_holds_now_is_used(shared):
    factor = jnp.float32(2.0)

    def function(x):
        return factor * x

    scheduled = shared.coordinator.function(function)
    first = shared.coordinator.schedule(scheduled, (3.0,)).fetch()
    factor = jnp.float32(5.0)
    second = shared.coordinator.schedule(scheduled, (3.0,)).fetch()
    assert (float(first), float(second)) == (6.0, 15.0)


def test_jitted_functions_and_steps_are_scheduled(shared):
    v = shared.variable(1.0)
    jitted = jax.jit(lambda x: (v.assign_add(x), x * v.value())[1])
    assert float(shared.coordinator.schedule(jitted, (2.0,)).fetch()) == 6.0

    @shared.strategy.run
    def step(x):
        return js.get_replica_context().all_reduce("sum", x)

    assert float(shared.coordinator.schedule(step, (2.0,)).fetch()) == 2.0


def test_an_error_while_tracing_comes_out_of_schedule(shared):
    def function():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        shared.schedule(function)
    shared.coordinator.join()
    assert int(shared(lambda: 1)) == 1


def test_a_variable_of_the_coordinator_is_refused(shared):
    own = js.Variable(1.0, name="own")
    with pytest.raises(js.ContextError, match="'own', which was not made in the scope"):
        shared.schedule(lambda: own.value())


# Tables.


def test_rows_are_read_and_changed(shared):
    t = shared.variable(np.arange(10.0, dtype="float32").reshape(5, 2))

    def function(ids):
        rows = read_rows(ids, (t.value(),))
        t.scatter_sub(js.IndexedSlices(jnp.ones_like(rows), ids))
        return rows

    rows = shared(function, np.array([0, 4, 4]))
    assert rows.tolist() == [[0, 1], [8, 9], [8, 9]]
    expected = np.arange(10.0).reshape(5, 2)
    expected[0] -= 1
    expected[4] -= 2
    np.testing.assert_array_equal(t.numpy(), expected)


def test_a_row_that_there_is_not_is_an_error(shared):
    t = shared.variable(np.zeros((7, 2), "float32"))
    for wrong in (7, -1):
        shared.schedule(lambda i: read_rows(i, (t.value(),)), np.array([wrong]))
        with pytest.raises(IndexError, match=rf"Row {wrong} .* \[0, 7\)"):
            shared.coordinator.join()


def test_training_on_workers_approaches_the_minimum(shared):
    target = np.float32(1.0)
    k = shared.variable(0.0)

    def function():
        gradient = js.grad(lambda: (k.value() - target) ** 2, k)()
        k.assign_sub(0.05 * gradient)

    before = abs(float(k) - 1)
    scheduled = shared.coordinator.function(function)
    for _ in range(40):
        shared.coordinator.schedule(scheduled)
    shared.coordinator.join()
    assert abs(float(k) - 1) < 0.2 * before


def test_a_method_is_traced_once(shared):
    class Model:
        traces = 0

        def step(self, x):
            self.traces += 1
            return 2 * x

    model = Model()
    scheduled = [shared.schedule(model.step, float(i)) for i in range(3)]
    assert [float(each.fetch()) for each in scheduled] == [0, 2, 4]
    assert model.traces == 1


# Functions that call Python have no exported form.


def callback_function(strategy, v, t):
    def function(x, ids, key):
        jax.debug.print("x = {}", x)
        v.assign_add(x)
        sine = jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), np.float32), x)
        rows = read_rows(ids, (t.value(),))
        doubled = strategy.reduce("sum", strategy.run(lambda: 2 * x))
        return sine, v.value(), rows, jax.random.normal(key), doubled

    return function


def check_callbacks(cluster):
    v = cluster.variable(1.0)
    t = cluster.variable(np.arange(8.0, dtype="float32").reshape(4, 2))
    function = cluster.coordinator.function(callback_function(cluster.strategy, v, t))
    given = np.float32(2.0), np.array([1, 3]), jax.random.key(1)
    results = [cluster.coordinator.schedule(function, given) for _ in range(3)]
    cluster.coordinator.join()
    assert float(v) == 7.0
    sine, value, rows, normal, doubled = results[0].fetch()
    assert sine == np.sin(np.float32(2.0))
    assert value in (3.0, 5.0, 7.0)
    assert rows.tolist() == [[2, 3], [6, 7]]
    assert normal == jax.random.normal(given[2])
    assert doubled == 4.0


def test_functions_may_call_python(shared, capfd):
    check_callbacks(shared)
    assert capfd.readouterr().out.count("x = 2.0") == 3


@pytest.mark.slow
def test_functions_may_call_python_in_other_processes():
    strategy = js.ParameterServerStrategy(workers=2, parameter_servers=1)
    cluster = object.__new__(Cluster)
    cluster.strategy = strategy
    with js.coordinator.ClusterCoordinator(strategy) as cluster.coordinator:
        check_callbacks(cluster)
    strategy.close()


def test_workers_keep_as_many_programs_as_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(_recently_used.RecentlyUsed.__init__, "__defaults__", (2,))
    cluster = Cluster(workers=1, servers=1)
    with cluster.coordinator:
        functions = [
            cluster.coordinator.function(lambda x, i=i: x + i) for i in range(4)
        ]
        for _ in range(2):
            results = [cluster.coordinator.schedule(each, (1.0,)) for each in functions]
            assert [float(each.fetch()) for each in results] == [1, 2, 3, 4]
        life = cluster.strategy.backend._lives[0]
        assert len(life._engine._programs._held) == 2
