"""What a scheduled function raises: once, as the same object, and nothing runs on."""

import numpy as np
import pytest
from helpers.fake_workers import Gate, coordinator, here, push
from helpers.threads import until

import jaxstrategy as js
from jaxstrategy.parameter_servers._worker_resource import WorkerResource


@pytest.fixture
def coordinated():
    with coordinator(2) as made:
        yield made


def raising(error):
    def f():
        raise error

    return f


def schedule(coordinated, fn, *args):
    return coordinated.schedule(coordinated.function(fn), args)


def test_join_raises_the_error_once(coordinated):
    schedule(coordinated, raising(ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        coordinated.join()
    coordinated.join()
    assert coordinated.done()
    assert schedule(coordinated, lambda: 1).fetch() == 1


def test_done_raises_the_error_once(coordinated):
    bad = schedule(coordinated, raising(ValueError("no")))
    until(lambda: bad.status is js.coordinator.RemoteValueStatus.ABORTED)
    with pytest.raises(ValueError, match="no"):
        coordinated.done()
    assert coordinated.done()


def test_fetch_raises_the_very_error_for_ever_and_does_not_clear_it(coordinated):
    error = ValueError("no")
    bad = schedule(coordinated, raising(error))
    for call in (bad.fetch, bad.get, coordinated.join, bad.fetch, bad.fetch):
        with pytest.raises(ValueError) as raised:
            call()
        assert raised.value is error
    coordinated.join()


def test_schedule_raises_the_error_and_schedules_nothing(coordinated):
    bad = schedule(coordinated, raising(ValueError("no")))
    until(lambda: bad.status is js.coordinator.RemoteValueStatus.ABORTED)
    traced = coordinated.tracer.calls
    with pytest.raises(ValueError, match="no"):
        schedule(coordinated, lambda: push(1))
    assert coordinated.tracer.calls == traced  # it was not even looked at
    coordinated.join()
    assert coordinated.backend.servers[0].total == 0
    schedule(coordinated, lambda: push(1))
    coordinated.join()
    assert coordinated.backend.servers[0].total == 1


def test_what_is_queued_behind_an_error_never_runs():
    with coordinator(1) as coordinated:
        gate = Gate()
        schedule(coordinated, gate)
        gate.wait_until_entered()
        schedule(coordinated, raising(ValueError("no")))
        values = [schedule(coordinated, lambda: push(1)) for _ in range(20)]
        gate.open.set()
        with pytest.raises(ValueError):
            coordinated.join()
        assert coordinated.backend.servers[0].total == 0
        for value in values:
            with pytest.raises(js.CancelledError, match="another one had failed: Val"):
                value.fetch()


def test_only_the_first_of_two_errors_is_ever_raised(coordinated):
    gate = Gate()

    def late():
        gate()
        raise KeyError("second")

    late_value = schedule(coordinated, late)
    gate.wait_until_entered()
    bad = schedule(coordinated, raising(ValueError("first")))
    until(lambda: bad.status is js.coordinator.RemoteValueStatus.ABORTED)
    gate.open.set()
    with pytest.raises(ValueError, match="first"):
        coordinated.join()
    coordinated.join()
    assert coordinated.done()
    with pytest.raises(KeyError, match="second"):
        late_value.fetch()


def test_what_runs_ends_before_the_error_comes_and_changes_nothing(coordinated):
    """A program cannot be interrupted: what it then pushes does not count."""
    gate, pushed = Gate(), []

    def slow():
        gate()
        pushed.append(push(1))
        return np.int32(1)

    value = schedule(coordinated, slow)
    gate.wait_until_entered()
    bad = schedule(coordinated, raising(ValueError("no")))
    until(lambda: bad.status is js.coordinator.RemoteValueStatus.ABORTED)
    with pytest.raises(TimeoutError):
        coordinated.join(timeout=0.05)  # it waits for what runs
    gate.open.set()
    with pytest.raises(ValueError):
        coordinated.join()
    assert pushed == [False] and coordinated.backend.servers[0].total == 0
    with pytest.raises(js.CancelledError) as raised:
        value.fetch()
    assert isinstance(raised.value.__cause__, ValueError)
    # The worker was not lost by that, and what it pushes next counts.
    for _ in range(4):
        schedule(coordinated, lambda: push(1))
    coordinated.join()
    assert coordinated.backend.servers[0].total == 4
    assert len(coordinated.backend.lives) == 2


def test_what_is_done_before_the_error_stays(coordinated):
    schedule(coordinated, lambda: push(100))
    coordinated.join()
    schedule(coordinated, raising(ValueError("no")))
    with pytest.raises(ValueError):
        coordinated.join()
    assert coordinated.backend.servers[0].total == 100


def test_fetch_of_good_and_bad_raises_the_error_and_join_once_more(coordinated):
    good = schedule(coordinated, lambda: 1)
    assert good.fetch() == 1
    bad = schedule(coordinated, raising(ValueError("no")))
    with pytest.raises(ValueError):
        coordinated.fetch([good, bad])
    with pytest.raises(ValueError):
        coordinated.join()
    coordinated.join()
    assert good.fetch() == 1


def test_notes_and_types_of_errors_are_those_of_the_worker(coordinated):
    class Own(Exception):
        pass

    error = Own("text")
    error.add_note("the worker's traceback")
    schedule(coordinated, raising(error))
    with pytest.raises(Own, match="text") as raised:
        coordinated.join()
    assert raised.value.__notes__ == ["the worker's traceback"]


# What workers build for themselves.


def using(fn, *resources):
    fn.uses = resources
    return fn


def test_iterators_belong_to_one_worker_each():
    """CCO-36: each of three workers reads all of range(5)."""
    with coordinator(3) as coordinated:
        dataset = WorkerResource(lambda index: range(5))
        iterator = WorkerResource(lambda index, data: iter(data), (dataset,))
        found = []

        def take():
            value = next(here.iterators[0], None)
            found.append((here.worker.index, value))

        for _ in range(200):
            schedule(coordinated, using(take, iterator))
            coordinated.join()
            if len({w for w, value in found if value is None}) == 3:
                break
            gate_others(coordinated)
        for worker in range(3):
            read = [value for w, value in found if w == worker and value is not None]
            assert read == [0, 1, 2, 3, 4][: len(read)]
        assert sorted(v for _, v in found if v is not None) == sorted([*range(5)] * 3)


def gate_others(coordinated):
    """Let each worker run something, so that the next free one differs."""
    gate = Gate()
    for _ in coordinated.workers:
        schedule(coordinated, gate)
    gate.wait_until_entered(len(coordinated.workers))
    gate.open.set()
    coordinated.join()


def test_two_iterators_over_one_dataset_are_independent(coordinated):
    dataset = WorkerResource(lambda index: [7, 8])
    first, second = (
        WorkerResource(lambda index, data: iter(data), (dataset,)) for _ in range(2)
    )

    def take():
        return [np.int32(next(each)) for each in here.iterators]

    assert schedule(coordinated, using(take, first, second)).fetch() == [7, 7]


def test_a_resource_that_cannot_be_built_fails_the_functions_that_use_it(coordinated):
    calls = []

    def build(index):
        calls.append(index)
        raise KeyError("no such file")

    broken = WorkerResource(build)
    coordinated.join()
    assert coordinated.done() and schedule(coordinated, lambda: 1).fetch() == 1
    iterator = WorkerResource(lambda index, data: iter(data), (broken,))
    bad = schedule(coordinated, using(lambda: 1, iterator))
    for call in (bad.fetch, coordinated.join):
        with pytest.raises(js.ClosureInputError, match="KeyError: 'no such file'") as e:
            call()
        assert isinstance(e.value.original_exception, KeyError)
    coordinated.join()
    assert schedule(coordinated, lambda: 2).fetch() == 2
    for _ in range(4):  # it is not tried again on the same worker
        schedule(coordinated, using(lambda: 1, broken))
        with pytest.raises(js.ClosureInputError):
            coordinated.join()
    assert len(calls) == len(set(calls)) <= 2


def test_iterators_go_on_after_an_error():
    """COO-24"""
    with coordinator(1) as coordinated:
        iterator = WorkerResource(lambda index: iter(range(10)))

        def take():
            return np.int32(next(here.iterators[0]))

        assert schedule(coordinated, using(take, iterator)).fetch() == 0
        schedule(coordinated, raising(ValueError("no")))
        with pytest.raises(ValueError):
            coordinated.join()
        assert schedule(coordinated, using(take, iterator)).fetch() == 1


def test_each_worker_has_variables_of_its_own():
    """COO-13, PWV-20: the copies together have seen each function."""
    with coordinator(3) as coordinated:
        variable = WorkerResource(lambda index: [0])

        def add():
            here.iterators[0][0] += 1

        for _ in range(10):
            schedule(coordinated, using(add, variable))
        coordinated.join()
        scheduler = coordinated._scheduler
        values = [
            scheduler.on_worker(i, "read", lambda life: life.own(variable))
            for i in range(3)
        ]
        assert sum(value.fetch()[0] for value in values) == 10


def test_tasks_of_one_worker_are_not_waited_for_and_their_errors_are_their_own():
    with coordinator(2) as coordinated:

        def fail(life):
            raise ValueError("its own")

        value = coordinated._scheduler.on_worker(1, "fail", fail)
        with pytest.raises(ValueError, match="its own"):
            value.fetch()
        coordinated.join()
        assert coordinated.done()


def test_workers_forget_what_nobody_uses_any_more():
    with coordinator(1) as coordinated:
        resource = WorkerResource(lambda index: "data")
        coordinated._scheduler.keep(resource)
        (value,) = [schedule(coordinated, using(lambda: 1, resource))]
        value.fetch()
        coordinated.join()
        (life,) = coordinated.backend.lives
        assert list(life.resources.values()) == ["data"]
        coordinated.tracer.backend.functions.clear()
        value = resource = None
        until(lambda: not life.resources)
