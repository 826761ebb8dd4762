"""Workers in processes of their own are sent the functions of datasets."""

import os
import threading

import jax
import numpy as np
import pytest
from helpers.clusters import until_each_has

import jaxstrategy as js

SECONDS = 60
index = js.coordinator.experimental_get_current_worker_index


@pytest.fixture(scope="module")
def two():
    """A coordinator of two workers with two devices each, and two servers."""
    js.simulate(8)
    backend = js.coordinator.LocalProcesses(2, 2, devices_per_worker=2)
    strategy = js.ParameterServerStrategy(backend=backend)
    yield js.coordinator.ClusterCoordinator(strategy)
    strategy.close()


def first(iterator):
    return index(), next(iterator)


def test_functions_read_variables_of_servers_where_they_run(two):
    """Each element is read with the worker's own connection when it is made."""
    with two.strategy.scope():
        a, b = js.Variable(1.0, name="a"), js.Variable([10.0, 20.0], name="b")

    def make():
        pair = {"again": b}  # the same variable, in something else

        def read():
            while True:
                yield np.float32(
                    [os.getpid() % 1000, a + b[1], pair["again"].value().sum()]
                )

        return read

    dataset = two.create_per_worker_dataset(make)
    found = until_each_has(two, two.function(first), (iter(dataset),))
    pids = {own[0][0] for own in found.values()}
    assert len(pids | {os.getpid() % 1000}) == 3
    for own in found.values():
        assert own[0][1:].tolist() == [21, 30]
    a.assign(100.0)
    found = until_each_has(two, two.function(first), (iter(dataset),))
    assert all(own[0][1] == 120 for own in found.values())


def test_datasets_of_the_strategy_are_divided_over_the_workers_devices(two):
    strategy = two.strategy

    def make():
        rows = np.arange(4.0, dtype=np.float32) + 100 * index()
        return strategy.experimental_distribute_dataset([rows] * 40)

    @two.function
    def step(iterator):
        doubled = strategy.run(lambda x: 2 * x, (next(iterator),))
        return index(), strategy.experimental_local_results(doubled)

    for worker, own in until_each_has(
        two, step, (iter(two.create_per_worker_dataset(make)),)
    ).items():
        expected = 2 * (np.arange(4.0).reshape(2, 2) + 100 * worker)
        np.testing.assert_array_equal(own[0], expected)


def test_what_a_function_of_a_dataset_cannot_do_hurts_only_who_uses_it(two):
    """It may send no lock, reach no other variable, make none and start nothing."""
    lock, parent, strategy = threading.Lock(), os.getpid(), two.strategy
    made_here = js.Variable(1.0, name="here")

    def variable():
        return [1.0] if os.getpid() == parent else [js.Variable(1.0)]

    def coordinator():
        if os.getpid() != parent:
            js.coordinator.ClusterCoordinator(strategy).join()
        return [1.0]

    for message, make, kind in [
        ("cannot pickle", lambda: [lock.locked()], TypeError),
        ("'here' is mirrored, where w", lambda: [made_here.numpy()], TypeError),
        ("Creating variables in `dataset_fn`", variable, Exception),
        ("to start workers", coordinator, Exception),
    ]:
        iterator = iter(two.create_per_worker_dataset(make))
        two.schedule(two.function(lambda it: next(it)), (iterator,))
        with pytest.raises(js.errors.ClosureInputError, match=message) as caught:
            two.join(SECONDS)
        assert isinstance(caught.value.original_exception, kind)


def test_a_function_that_calls_python_has_what_its_worker_has(two):
    """JAX exports no such program: workers are sent the function, and trace it."""
    with two.strategy.scope():
        total = js.Variable(0.0, per_worker_variable=True)

    def double(x):
        return np.asarray(2 * x)

    @two.function
    def step(iterator):
        x = next(iterator)
        total.assign_add(x)
        like = jax.ShapeDtypeStruct((), np.float32)
        return index(), (jax.pure_callback(double, like, x), total.value())

    dataset = two.create_per_worker_dataset(
        lambda: [np.float32(10 * index() + i) for i in range(40)]
    )
    found = until_each_has(two, step, (iter(dataset),))
    for worker, own in found.items():
        rows = [10 * worker + i for i in range(len(own))]
        # Nobody can prove that both replicas' callbacks return the same.
        doubled = [tuple(map(float, value.values)) for value, _ in own]
        assert doubled == [(2 * x, 2 * x) for x in rows]
        sums = [sum(rows[: i + 1]) for i in range(len(rows))]
        assert [total for _, total in own] == sums
    assert total.read_all() == [own[-1][1] for own in found.values()]
