"""A worker that was lost builds again what it had: datasets, iterators, variables."""

import itertools

import numpy as np
import pytest
from helpers.clusters import SECONDS, coordinated
from helpers.threads import until

import jaxstrategy as js

index = js.coordinator.experimental_get_current_worker_index


def restarted(coordinator, worker=0):
    """End a worker, and wait until another life of it has begun."""
    idle = js.coordinator.WorkerActivity.IDLE
    until(lambda: coordinator.workers[worker].activity is idle, SECONDS)
    before = coordinator.workers[worker].incarnation
    coordinator.strategy.backend.kill(worker)
    until(lambda: coordinator.workers[worker].incarnation > before, SECONDS)


def taken(coordinator, step, iterator, count):
    values = [coordinator.schedule(step, (iterator,)) for _ in range(count)]
    return [int(x) for x in coordinator.fetch(values)]


def test_an_iterator_begins_again(one):
    calls = []

    def make():
        calls.append(index())
        return itertools.count(5)

    dataset = one.create_per_worker_dataset(make)
    iterator = iter(dataset)
    step = one.function(lambda iterator: next(iterator))
    assert taken(one, step, iterator, 3) == [5, 6, 7]
    restarted(one)
    assert taken(one, step, iterator, 2) == [5, 6]
    # Here, on the worker, and on the worker that came after it.
    assert len(calls) == 3


def test_an_iterator_resumes_where_functions_had_used_it(one):
    """What was read ahead and not used comes again; the oracle is the list."""

    def make():
        rows = [np.full(2, i) for i in range(20)]
        return one.strategy.experimental_distribute_dataset(rows)

    iterator = iter(one.create_per_worker_dataset(make, resume=True))
    step = one.function(lambda iterator: next(iterator)[0] + 0 * next(iterator)[0])
    assert taken(one, step, iterator, 3) == [0, 2, 4]
    restarted(one)
    assert taken(one, step, iterator, 2) == [6, 8]
    restarted(one)
    assert taken(one, step, iterator, 1) == [10]


def test_each_iterator_of_each_worker_resumes_by_itself():
    with coordinated(2) as two:
        dataset = two.create_per_worker_dataset(
            lambda: range(100 * index(), 100 * index() + 50), resume=True
        )
        fast, slow = iter(dataset), iter(dataset)

        @two.function
        def step(fast, slow):
            next(fast)
            return index(), (next(fast), next(slow))

        def seen(count):
            found = {0: [], 1: []}
            while min(map(len, found.values())) < count:
                values = [two.schedule(step, (fast, slow)) for _ in range(2)]
                for worker, pair in two.fetch(values):
                    found[int(worker)].append(tuple(map(int, pair)))
            return found

        before = seen(2)
        for worker in range(2):
            restarted(two, worker)
        for worker, after in seen(1).items():
            everything = before[worker] + after
            assert everything == [
                (100 * worker + 2 * i + 1, 100 * worker + i)
                for i in range(len(everything))
            ]


@pytest.mark.parametrize(
    "make",
    [lambda: (i for i in range(3)), lambda: iter([1, 2])],
    ids=["generator", "iterator"],
)
def test_what_cannot_be_resumed_is_refused(one, make):
    with pytest.raises(TypeError, match="cannot resume: it can be read only once"):
        one.create_per_worker_dataset(make, resume=True)


def test_a_variable_begins_again(one):
    with one.strategy.scope():
        total = js.Variable(3.0, per_worker_variable=True)
    add = one.function(lambda: total.assign_add(1.0))
    for _ in range(4):
        one.schedule(add)
    one.join()
    assert total.read_all() == [7]
    restarted(one)
    assert total.read_all() == [3]
    one.schedule(add)
    one.join()
    assert total.read_all() == [4]


def test_a_dataset_that_failed_is_built_anew_by_the_next_life(one):
    calls = itertools.count()

    def make():
        if next(calls) == 1:
            raise OSError("not mounted yet")
        return [4, 5]

    iterator = iter(one.create_per_worker_dataset(make))
    step = one.function(lambda iterator: next(iterator))
    for _ in range(2):  # it is not tried again meanwhile
        one.schedule(step, (iterator,))
        with pytest.raises(js.errors.ClosureInputError, match="not mounted yet"):
            one.join()
    restarted(one)
    assert taken(one, step, iterator, 1) == [4]
