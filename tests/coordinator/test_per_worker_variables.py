"""Variables of which each worker has a copy; TensorFlow's cases, and counts by hand."""

import copy
import pickle
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.clusters import SECONDS, coordinated, until_each_has

import jaxstrategy as js

index = js.coordinator.experimental_get_current_worker_index


def own(coordinator, start=0.0, **options):
    with coordinator.strategy.scope():
        return js.Variable(start, per_worker_variable=True, **options)


def test_copies_are_read_in_the_order_of_the_workers(three):
    mine = own(three, -1)

    @three.function
    def note():
        mine.assign(10 * index())
        return index(), mine.value()

    for worker, found in until_each_has(three, note).items():
        assert set(map(int, found)) == {10 * worker}
    assert mine.read_all() == [0, 10, 20]
    # A second function sees what the first one has left.
    found = until_each_has(three, three.function(lambda: (index(), mine + 1)))
    assert {worker: int(x[0]) for worker, x in found.items()} == {0: 1, 1: 11, 2: 21}


def test_none_counts_as_a_servers_variable():
    with coordinated(2, servers=2) as coordinator, coordinator.strategy.scope():
        variables = [js.Variable(0.0, per_worker_variable=i == 1) for i in range(3)]
    assert [v.device for v in variables] == [
        "/job:ps/replica:0/task:1/device:CPU:0",
        "/job:worker/device:CPU:0",
        "/job:ps/replica:0/task:0/device:CPU:0",
    ]


def test_all_changes_work_in_a_function():
    """The oracle is NumPy."""
    with coordinated(1) as one:
        v = own(one, [1.0, 2.0, 3.0])
        w = own(one, [0.0, 0.0])

        def twice(body, n):
            return jax.lax.fori_loop(0, n, lambda i, _: (body(i), 0)[1], 0)

        @one.function
        def step(x):
            v.assign_add(jnp.full(3, x))
            v[1].assign(5.0)
            v.scatter_add(js.IndexedSlices(jnp.ones(2), jnp.array([0, 2])))
            before = v.value()
            v.assign_sub([1.0, 1.0, 1.0])
            v.update(lambda old, k: k * old, 2.0)
            # A loop, which writes it as a reference.
            twice(lambda i: w.assign_add([1.0, 2.0]), 4)
            jax.lax.cond(x > 0, lambda: (w.assign(w * 10), 0)[1], lambda: 0)
            return before

        expected = np.array([1, 2, 3.0])
        for x in (1.0, -1.0):
            expected += x
            expected[1] = 5
            expected += [1, 0, 1]
            np.testing.assert_array_equal(one.schedule(step, (x,)).fetch(), expected)
            expected = 2 * (expected - 1)
        np.testing.assert_array_equal(v.read_all()[0], expected)
        np.testing.assert_array_equal(w.read_all()[0], [44, 88])
        assert one.metrics.closure_execution.count == 2


def test_the_coordinator_neither_reads_nor_changes_it(three):
    variable = own(three, 0.0, name="mine")
    for use in (
        lambda v: v.value(),
        lambda v: v.numpy(),
        lambda v: float(v),
        lambda v: v + 1,
        lambda v: v[0:1],
        lambda v: v.assign(1.0),
        lambda v: v.assign_add(1.0),
        lambda v: v.update(lambda old: old + 1),
        lambda v: jax.jit(lambda: v.value())(),
    ):
        with pytest.raises(
            js.errors.ContextError, match=r"'mine'.*`read_all\(\)` reads all"
        ):
            use(variable)
        with three.strategy.scope():
            with pytest.raises(js.errors.ContextError, match="read_all"):
                use(variable)


def test_what_such_a_variable_does_not_do_is_told(three):
    variable = own(three, [0.0], name="mine")
    assert repr(variable) == "<Variable 'mine' float32[1] with a copy on each worker>"
    with three.strategy.scope():
        other = js.Variable(0.0, name="v")

    def step():
        return variable.value()

    for use, error, told in [
        (
            lambda: three.strategy.run(step)(),
            js.errors.ContextError,
            "`step` runs in t",
        ),
        (lambda: copy.deepcopy(variable), RuntimeError, "each worker, and cannot be"),
        (lambda: pickle.dumps(variable), TypeError, "cannot be pickled"),
        (other.read_all, TypeError, "'v', of which workers have no copies"),
        (
            lambda: three.schedule(three.function(lambda: variable.read_all())),
            js.errors.ContextError,
            "sees the copy of its own worker",
        ),
    ]:
        with pytest.raises(error, match=told):
            use()


def test_what_it_cannot_be(three):
    mirrored = js.MirroredStrategy(js.simulate(8)[:2])
    with pytest.raises(ValueError, match="outside of the scope of a ParameterServer"):
        js.Variable(0.0, per_worker_variable=True)
    with mirrored.scope(), pytest.raises(ValueError, match="outside of the scope of"):
        js.Variable(0.0, per_worker_variable=True)
    for value, options, error, text in [
        ([0.0], {"sharding": 0}, ValueError, "Leave one of both out"),
        (jax.random.key(0), {}, TypeError, "random keys, which workers do not keep"),
        (0, {"aggregation": "mean"}, ValueError, "MEAN"),
    ]:
        with pytest.raises(error, match=text):
            own(three, value, **options)
    names = js.experimental.coordinator
    assert names.PerWorkerValues is js.coordinator.PerWorkerValue


# Remote values as arguments of scheduled functions, one for each worker.


def remote(coordinator, *values):
    """A remote value for each."""
    same = coordinator.function(lambda x: x)
    return [coordinator.schedule(same, (value,)) for value in values]


def test_each_worker_is_given_its_own(three):
    traces = []
    tens = js.coordinator.PerWorkerValue(remote(three, 10.0, 20.0, 30.0))
    assert len(tens) == 3 and all(
        isinstance(x, js.coordinator.RemoteValue) for x in tens.values
    )

    @three.function
    def step(own, pair):
        traces.append(1)
        return index(), own + pair["tens"] + pair["one"]

    found = until_each_has(three, step, (tens, {"tens": tens, "one": 1.0}))
    for worker, values in found.items():
        assert set(map(float, values)) == {20 * (worker + 1) + 1}
    assert len(traces) == 1


def until_it_fails(coordinator, step, value):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for _ in range(3):
            coordinator.schedule(step, (value,))
        coordinator.join()


@pytest.mark.parametrize("values", [[1, 2, 3], [np.ones(2)], ["x"]], ids=repr)
def test_only_remote_values_are_taken(values):
    with pytest.raises(AssertionError, match="`RemoteValue`s were wanted"):
        js.coordinator.PerWorkerValue(values)


def test_too_few_or_different_values_are_an_error_of_the_function(three):
    value = js.coordinator.PerWorkerValue(remote(three, 1.0))
    three.join()
    step = three.function(lambda own: (index(), own))
    with pytest.raises(IndexError, match=r"Worker [12] runs .* PerWorkerValue of 1 va"):
        until_it_fails(three, step, value)
    three.join()
    values = remote(three, np.ones(2), np.ones(3), np.ones(3))
    value = js.coordinator.PerWorkerValue(values)
    step = three.function(lambda own: (index(), own.sum()))
    with pytest.raises(TypeError, match=r"given float32\[3\] by .*value, float32\[2\]"):
        until_it_fails(three, step, value)
