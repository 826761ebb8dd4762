"""Errors of functions, workers that are lost and servers: nothing counts twice."""

import random
import threading
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.clusters import Activity, Cluster, Gate, Status, until

import jaxstrategy as js


@pytest.fixture(scope="module")
def shared():
    with Cluster(2, servers=2) as made:
        yield made


@pytest.fixture
def cluster(shared):
    """Two workers that are there, and nothing to be raised, before and after."""
    shared.until_idle()
    shared.total.assign(0.0)
    yield shared
    shared.open_all()
    shared.coordinator.join(60)


@pytest.fixture
def gate(cluster):
    return Gate(cluster)


def aborted(value):
    until(lambda: value.status is Status.ABORTED)


def test_an_error_is_the_same_object_wherever_it_comes_out_and_then_it_is_gone(cluster):
    error = js.OutOfRangeError("the end")
    error.add_note("of the worker")
    bad = cluster.schedule(cluster.raising(error))
    calls = (bad.fetch, bad.get, lambda: cluster.coordinator.fetch([bad]))
    for call in (*calls, cluster.coordinator.join, bad.fetch):
        with pytest.raises(js.OutOfRangeError, match="the end") as raised:
            call()
        assert raised.value is error and "of the worker" in error.__notes__
    assert len(raised.traceback) <= 12  # that of one object would only grow
    cluster.coordinator.join()
    assert cluster.coordinator.done() and cluster(cluster.add, 2.0) == 2.0
    bad = cluster.schedule(cluster.raising(ValueError("no")))
    aborted(bad)
    with pytest.raises(ValueError, match="no"):
        cluster.coordinator.done()
    assert cluster.coordinator.done()


def test_what_is_queued_behind_an_error_never_runs(cluster, gate):
    running = [cluster.schedule(gate.fn) for _ in range(2)]
    gate.until_entered(2)
    cluster.schedule(cluster.raising(ValueError("no")))
    values = [cluster.schedule(cluster.add) for _ in range(20)]
    gate.open.set()
    with pytest.raises(ValueError):
        cluster.coordinator.join()
    for value in values:
        with pytest.raises(
            js.errors.CancelledError, match="another one had failed: Val"
        ):
            value.fetch()
    assert cluster.sum() == 0.0
    assert all(value.status is not Status.NOT_READY for value in running)


def test_what_runs_ends_before_the_error_comes_and_changes_nothing(cluster, gate):
    value = cluster.schedule(gate.before(cluster.add), 1.0)
    gate.until_entered()
    starts = cluster.starts()
    aborted(cluster.schedule(cluster.raising(ValueError("first"))))
    raised = []

    def wait(call):
        try:
            call()
        except ValueError as error:
            raised.append(error)

    calls = cluster.coordinator.join, cluster.coordinator.done
    threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    with pytest.raises(TimeoutError):
        cluster.coordinator.join(timeout=0.1)  # it waits for what runs
    assert not raised
    gate.open.set()
    for thread in threads:
        thread.join(60)
    assert [str(error) for error in raised] == ["first"]  # one of the two
    with pytest.raises(js.errors.CancelledError) as cancelled:
        value.fetch()
    assert cancelled.value.__cause__ is raised[0]
    assert cluster.sum() == 0.0
    # The worker was not lost by that, and what it pushes next counts.
    for _ in range(4):
        cluster.schedule(cluster.add)
    cluster.coordinator.join()
    assert cluster.sum() == 4.0 and cluster.starts() == starts


def test_what_is_done_before_an_error_stays_and_what_fails_changes_nothing(cluster):
    table = cluster.variable(np.zeros((4, 2), np.float32))

    def add(row):
        cluster.total.assign_add(100.0)
        table.scatter_add(js.IndexedSlices(jnp.ones((1, 2)), row[None]))

    cluster(add, 1)
    bad = cluster.schedule(add, 7)
    for call in (bad.fetch, cluster.coordinator.join):
        with pytest.raises(IndexError, match="7"):
            call()
    assert cluster.sum() == 100.0
    cluster(add, 3)
    assert cluster.sum() == 200.0


def test_a_full_queue_lets_schedule_wait_until_there_is_room_or_an_error(
    cluster, gate, monkeypatch
):
    monkeypatch.setattr(cluster.coordinator._scheduler, "_limit", 2)
    fn = cluster.coordinator.function(gate.fn)
    running = [cluster.coordinator.schedule(fn) for _ in range(4)]
    gate.until_entered(2)
    made = []
    waiting = threading.Thread(
        target=lambda: made.append(cluster.coordinator.schedule(fn, (3.0,)))
    )
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and not made
    gate.open.set()
    waiting.join(60)
    assert made[0].fetch() == 3.0 and cluster.coordinator.fetch(running) == [0.0] * 4
    # With room for two, many threads schedule and join.
    threads = [
        threading.Thread(target=lambda: [cluster.schedule(cluster.add) for _ in "0123"])
        for _ in range(4)
    ]
    threads.append(threading.Thread(target=cluster.coordinator.join))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    cluster.coordinator.join()
    assert cluster.sum() == 16.0 and cluster.coordinator.metrics.queued_closures == 0


def test_each_function_counts_once_whatever_is_lost_and_fails():
    """Workers end before, in and after functions, some of which fail."""
    chance = random.Random(0)
    fates = np.array([chance.random() for _ in range(60)], np.float32)
    lost, errors, values = set(), 0, {}
    with Cluster(3, servers=2, max_restarts=1000) as cluster:
        counts = cluster.variable(np.zeros(61, np.float32))

        def before(worker, number):
            if fates[number] < 0.1 and number not in lost:
                lost.add(number)
                cluster.kill(worker)
            if number > 30 and fates[number] > 0.9:
                raise ValueError(f"of {number}")

        def after(worker, number):
            if 0.1 < fates[number] < 0.2 and number not in lost:
                lost.add(number)
                cluster.kill(worker)
                raise js.WorkerLost("after its pushes")

        def f(number):
            cluster.total.assign_add(1.0)
            counts.scatter_add(js.IndexedSlices(jnp.ones(1), number[None]))
            return number

        f = cluster.function(f, before, after)

        def tried(call, *args):
            nonlocal errors
            try:
                return call(*args)
            except ValueError:
                errors += 1

        for number in range(60):
            value = tried(cluster.coordinator.schedule, f, (np.int32(number),))
            if value is not None:
                values[number] = value
        for _ in range(2):
            tried(cluster.coordinator.join, 60)
        assert errors and lost
        seen = counts.numpy()
        for number, value in values.items():
            assert value.status is not Status.NOT_READY
            # What is ready has counted; what was cancelled may have before.
            assert seen[number] <= 1
            assert seen[number] == 1 or value.status is Status.ABORTED
        assert seen.sum() == cluster.sum()


def test_what_was_pushed_before_the_worker_was_lost_counts_once(cluster, monkeypatch):
    """And what it sends later, when it is given up, does not."""
    first, second = cluster.total, cluster.variable(0.0)
    if first.device == second.device:
        second = cluster.variable(0.0)
    servers, sent = cluster.backend.servers, []
    for server in servers:

        def push(operations, call=None, server=server, before=server.push):
            counts = before(operations, call)
            if call is not None and not sent:
                cluster.kill(call.worker)
            if call is not None:
                sent.append((server, operations, call))
            return counts

        monkeypatch.setattr(server, "push", push)

    def both():
        first.assign_add(1.0)
        second.assign_add(1.0)

    cluster(both)
    assert (cluster.sum(), float(second)) == (1.0, 1.0)
    lives = {(call.worker, call.incarnation) for _, _, call in sent}
    assert len(lives) == 2  # another worker may take it, or the next life of this one
    monkeypatch.undo()
    for server, operations, call in sent:
        assert not server.push(operations, call)  # once more
    server, operations, call = sent[0]
    late = call._replace(function=10**9)
    assert not server.push(operations, late)  # of a worker that was given up
    assert (cluster.sum(), float(second)) == (1.0, 1.0)


def test_without_any_worker_functions_wait_and_join_says_so_once(cluster):
    """CCO-42"""
    cluster.coordinator._scheduler._patience = 0.0
    back = threading.Event()
    cluster.away.update({0: back, 1: back})
    for worker in range(2):
        cluster.kill(worker)
    until(lambda: cluster.activities() == [Activity.LOST] * 2)
    values = [cluster.schedule(cluster.add) for _ in range(10)]
    assert not cluster.coordinator.done()
    with pytest.warns(RuntimeWarning) as told, pytest.raises(TimeoutError):
        cluster.coordinator.join(timeout=1.2)
    assert len(told) == 1 and told[0].filename == __file__
    assert "All 2 workers are lost, so that no function" in str(told[0].message)
    back.set()
    cluster.away.clear()
    cluster.coordinator._scheduler._patience = 10.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they may not be back at once
        cluster.coordinator.join()
    assert sum(value.fetch() for value in values) == 10 == cluster.sum()


def test_a_function_that_ends_three_workers_is_named_and_held_against_none(cluster):
    def deadly():
        return 1.0

    deadly, starts = cluster.function(deadly, cluster.kill), sum(cluster.starts())
    for _ in range(2):
        value = cluster.schedule(deadly)
        with pytest.raises(RuntimeError) as raised:
            cluster.coordinator.join()
        text = str(raised.value)
        assert (
            text.startswith("`deadly_")
            and f"` ({__file__}:" in text
            and "def deadly():" in text
        )
        assert "was run 3 times, and each time its worker was lost" in text
        assert "was killed" in text and isinstance(
            raised.value.__cause__, js.WorkerLost
        )
        with pytest.raises(RuntimeError):
            value.fetch()
    cluster(cluster.add)
    assert cluster.sum() == 1.0
    cluster.until_idle()
    assert sum(cluster.starts()) == starts + 6


def test_a_worker_that_does_not_come_up_is_given_up_and_the_others_go_on():
    with Cluster(2, max_restarts=1) as cluster:
        cluster.until_idle()
        own = cluster.variable(1.0, per_worker_variable=True)
        cluster.refusals[0] = 100
        cluster.kill(0)
        until(lambda: cluster.activities()[0] is Activity.GIVEN_UP)
        with pytest.raises(RuntimeError) as raised:
            cluster.coordinator.join()
        text = str(raised.value)
        assert "Worker 0 was lost 2 times within 300 s without finishing" in text
        assert "is not started again" in text and "worker 0 did not come up" in text
        cluster.coordinator.join()
        for _ in range(5):
            cluster.schedule(cluster.add)
        cluster.coordinator.join()
        assert cluster.sum() == 5.0
        with pytest.raises(js.errors.ClosureAbortedError, match="Worker 0 was lost"):
            own.read_all()
        # Finished functions make up for the losses of the other one.
        for _ in range(3):
            starts = cluster.starts()[1]
            cluster.kill(1)
            until(lambda: cluster.starts()[1] == starts + 1)  # noqa: B023
            cluster(cluster.add)
        # Without any worker it is an error for ever.
        cluster.refusals[1] = 100
        cluster.kill(1)
        until(lambda: cluster.activities() == [Activity.GIVEN_UP] * 2)
        again = cluster.coordinator.join
        for call in (again, cluster.coordinator.done, again):
            with pytest.raises(RuntimeError, match="Worker 1 was lost 2 times"):
                call()
        with pytest.raises(RuntimeError, match="Worker 1 was lost 2 times"):
            cluster.schedule(cluster.add)


def test_an_error_that_is_not_the_workers_ends_its_starts():
    with Cluster(1) as cluster:
        cluster.until_idle()

        def start(worker, incarnation):
            raise FileNotFoundError("python")

        cluster.backend.start = start
        cluster.kill(0)
        until(lambda: cluster.activities() == [Activity.GIVEN_UP])
        with pytest.raises(FileNotFoundError, match="python") as raised:
            cluster.coordinator.join()
        assert raised.value.__notes__ == ["Worker 0 could not be started."]


# Servers. With a checkpoint they are started again: see `test_lost_servers`.


def test_a_lost_server_is_an_error_for_ever():
    """CCO-49, FLT-6, FLT-7, FLT-8: each time, where TensorFlow alternates."""
    with Cluster(2, servers=2) as cluster:
        living = cluster.variable(2.0)
        assert living.device != cluster.total.device
        cluster(lambda: cluster.total + living)
        gate = Gate(cluster)
        waiting = cluster.schedule(gate.fn)
        gate.until_entered()
        cluster.backend.kill_server(0)
        bad = cluster.schedule(cluster.add)
        with pytest.raises(js.errors.ParameterServerLost):
            bad.fetch()
        cluster.kill(1)
        gate.open.set()
        for _ in range(2):
            for call in (
                cluster.coordinator.join,
                cluster.coordinator.done,
                lambda: cluster.schedule(cluster.add),
            ):
                with pytest.raises(
                    js.errors.ParameterServerLost, match="server 0 was killed"
                ):
                    call()
        with pytest.raises(js.errors.CancelledError):
            waiting.fetch()
        with pytest.raises(js.errors.ParameterServerLost):
            cluster.total.value()
        assert living.value() == 2.0
