"""Workers that are lost, and servers: nothing is lost, nothing counts twice."""

import threading
import warnings

import numpy as np
import pytest
from helpers.fake_workers import Gate, coordinator, here, push
from helpers.threads import until

import jaxstrategy as js
from jaxstrategy.coordinator._deaths import Deaths
from jaxstrategy.parameter_servers._worker_resource import WorkerResource

Activity = js.coordinator.WorkerActivity


def schedule(coordinated, fn, *args):
    return coordinated.schedule(coordinated.function(fn), args)


def activities(coordinated):
    return [state.activity for state in coordinated.workers]


def test_what_a_lost_worker_was_running_runs_again():
    with coordinator(2) as coordinated:
        gate = Gate()

        def slow():
            gate()
            push(1)
            return np.int32(5)

        values = [schedule(coordinated, slow) for _ in range(30)]
        gate.wait_until_entered(2)
        coordinated.backend.kill(0)
        until(lambda: len(coordinated.backend.lives) == 3)
        gate.open.set()
        coordinated.join()
        assert [value.fetch() for value in values] == [5] * 30
        assert coordinated.backend.servers[0].total == 30
        assert coordinated.backend.lives[2].index == 0


def test_what_was_pushed_before_the_worker_was_lost_counts_once():
    with coordinator(2, servers=2) as coordinated:
        died = []

        def f():
            push(1, server=0)
            if not died:
                died.append(here.worker.index)
                here.worker.kill()
            push(1, server=1)  # a worker that is given up may still send
            return np.int32(0)

        schedule(coordinated, f)
        coordinated.join()
        assert [server.total for server in coordinated.backend.servers] == [1, 1]


def test_a_new_life_is_fenced_before_it_is_used():
    with coordinator(1) as coordinated:
        seen = []

        def f():
            server = coordinated.backend.servers[0]
            number = here.call.number.incarnation
            seen.append((here.worker.incarnation, number, server.fences.get(0, 0)))
            if len(seen) == 1:
                here.worker.kill()

        schedule(coordinated, f)
        coordinated.join()
        assert seen == [(0, 0, 0), (1, 1, 1)]


def test_what_a_lost_worker_sends_late_does_not_count():
    with coordinator(1) as coordinated:
        late = []

        def f():
            if not late:
                late.append(here.call.number)
                here.worker.kill()

        schedule(coordinated, f)
        coordinated.join()
        server = coordinated.backend.servers[0]
        assert server.push(1, late[0]._replace(function=10**9)) is False


def test_a_function_goes_to_any_worker_behind_what_is_queued():
    with coordinator(2) as coordinated:
        gates, order = [Gate(), Gate()], []
        coordinated.backend.gates[0] = threading.Event()
        coordinated.backend.gates[0].set()

        def f(name):
            order.append((int(name), here.worker.index))
            if name < 2:
                gates[name]()

        for name in range(4):
            schedule(coordinated, f, np.int32(name))
        for gate in gates:
            gate.wait_until_entered()
        first = dict(order)[0]
        coordinated.backend.gates[first] = threading.Event()  # it stays away
        coordinated.backend.kill(first)
        until(lambda: activities(coordinated)[first] is Activity.LOST)
        for gate in gates:
            gate.open.set()
        coordinated.join()
        coordinated.backend.gates[first].set()
        assert [name for name, _ in order] in ([0, 1, 2, 3, 0], [1, 0, 2, 3, 0])
        assert order[-1] == (0, 1 - first)


def test_the_others_go_on_and_who_is_back_takes_part_by_itself():
    """CCO-40, CCO-41: nobody waits for the others."""
    with coordinator(3) as coordinated:
        away = {index: threading.Event() for index in (0, 1)}
        until(lambda: len(coordinated.backend.lives) == 3)
        coordinated.backend.gates.update(away)
        for index in away:
            coordinated.backend.kill(index)
        until(lambda: activities(coordinated)[:2] == [Activity.LOST] * 2)
        ran = round_of(coordinated, 1)
        assert set(ran) == {2}
        away[1].set()  # worker 0 stays away
        until(lambda: activities(coordinated)[1] is Activity.IDLE)
        assert set(round_of(coordinated, 2)) == {1, 2}
        assert activities(coordinated)[0] is Activity.LOST
        away[0].set()
        until(lambda: activities(coordinated)[0] is Activity.IDLE)
        assert set(round_of(coordinated, 3)) == {0, 1, 2}


def round_of(coordinated, workers):
    """Which workers run so many functions at a time."""
    gate, ran = Gate(), []

    def f():
        gate()
        ran.append(here.worker.index)

    for _ in range(2 * workers):
        schedule(coordinated, f)
    gate.wait_until_entered(workers)
    gate.open.set()
    coordinated.join()
    return ran


def test_without_any_worker_functions_wait_and_join_says_so_once():
    """CCO-42"""
    with coordinator(2, patience=0.0) as coordinated:
        until(lambda: len(coordinated.backend.lives) == 2)
        back = threading.Event()
        coordinated.backend.gates.update({0: back, 1: back})
        for index in range(2):
            coordinated.backend.kill(index)
        until(lambda: activities(coordinated) == [Activity.LOST] * 2)
        values = [schedule(coordinated, lambda: np.int32(1)) for _ in range(10)]
        assert not coordinated.done()
        with pytest.warns(RuntimeWarning) as told:
            with pytest.raises(TimeoutError):
                coordinated.join(timeout=1.2)
        assert len(told) == 1
        assert "All 2 workers are lost, so that no function" in str(told[0].message)
        assert told[0].filename == __file__
        back.set()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they may not be back at once
            coordinated.join()
        assert sum(value.fetch() for value in values) == 10


def test_results_stay_when_their_worker_is_lost():
    with coordinator(1) as coordinated:
        value = schedule(coordinated, lambda: (np.int32(1), np.int32(-1)))
        other = schedule(coordinated, lambda: np.ones(2, np.float32))
        coordinated.join()
        got = other.get()
        coordinated.backend.kill(0)
        assert value.fetch() == (1, -1)
        np.testing.assert_array_equal(got, [1, 1])
        np.testing.assert_array_equal(other.fetch(), [1, 1])


def test_a_returned_worker_builds_its_resources_anew_from_the_start():
    with coordinator(1) as coordinated:
        iterator = WorkerResource(lambda index: iter(range(5)))

        def take():
            return np.int32(next(here.iterators[0]))

        take.uses = (iterator,)
        assert [schedule(coordinated, take).fetch() for _ in range(2)] == [0, 1]
        coordinated.backend.kill(0)
        assert [schedule(coordinated, take).fetch() for _ in range(2)] == [0, 1]


def test_a_worker_may_be_lost_while_it_builds_or_learns_a_program():
    with coordinator(1) as coordinated:
        died = []

        def build(index):
            if not died:
                died.append(1)
                coordinated.backend.kill(0)
            return iter(range(3))

        def take():
            return np.int32(next(here.iterators[0]))

        take.uses = (WorkerResource(build),)
        values = [schedule(coordinated, take) for _ in range(3)]
        assert sorted(value.fetch() for value in values) == [0, 1, 2]


def test_an_idle_worker_that_is_lost_is_started_again_without_being_asked():
    with coordinator(1) as coordinated:
        until(lambda: activities(coordinated) == [Activity.IDLE])
        coordinated.backend.kill(0)
        until(lambda: len(coordinated.backend.lives) == 2)
        (state,) = coordinated.workers
        assert "worker 0 is gone, exit code -9" in state.error
        assert state.incarnation == 1


def test_a_task_of_one_worker_is_done_by_its_next_life():
    with coordinator(2) as coordinated:
        lives = []

        def task(life):
            lives.append(life)
            if len(lives) == 1:
                coordinated.backend.kill(1)
                life.build(WorkerResource(lambda index: 0))
            return "done"

        assert coordinated._scheduler.on_worker(1, "task", task).fetch() == "done"
        assert len(lives) == 2


def test_a_users_error_wins_over_lost_workers():
    """FLT-5"""
    with coordinator(2) as coordinated:
        gate = Gate()
        long = schedule(coordinated, gate)
        gate.wait_until_entered()

        def f():
            raise ValueError("the user's")

        bad = schedule(coordinated, f)
        until(lambda: bad.status is js.coordinator.RemoteValueStatus.ABORTED)
        for index in range(2):
            coordinated.backend.kill(index)
        with pytest.raises(ValueError, match="the user's"):
            coordinated.join()
        with pytest.raises(js.CancelledError):
            long.fetch()
        for _ in range(3):
            schedule(coordinated, lambda: push(1))
        coordinated.join()
        assert coordinated.backend.servers[0].total == 3


def deadly():
    """Ends each worker that runs it."""
    here.worker.kill()


def test_a_function_that_ends_three_workers_is_named():
    with coordinator(2) as coordinated:
        value = schedule(coordinated, deadly)
        with pytest.raises(RuntimeError) as raised:
            coordinated.join()
        text = str(raised.value)
        assert text.startswith(f"`deadly` ({__file__}:")
        assert "def deadly():" in text
        assert "was run 3 times, and each time its worker was lost" in text
        assert "worker" in text and "is gone, exit code -9" in text
        assert isinstance(raised.value.__cause__, js.WorkerLost)
        assert len(coordinated.backend.lives) <= 5
        with pytest.raises(RuntimeError):
            value.fetch()
        schedule(coordinated, lambda: push(1))
        coordinated.join()
        assert coordinated.backend.servers[0].total == 1


def test_what_a_function_is_to_blame_for_is_not_held_against_a_worker():
    with coordinator(1) as coordinated:
        for _ in range(3):
            schedule(coordinated, deadly)
            with pytest.raises(RuntimeError, match="`deadly`"):
                coordinated.join()
        schedule(coordinated, lambda: push(1))
        coordinated.join()
        assert coordinated.backend.servers[0].total == 1


def test_what_is_about_to_run_when_another_fails_does_not_run():
    with coordinator(1) as coordinated:
        queue = coordinated._scheduler._queue
        incarnations = coordinated._scheduler._incarnations
        usual = type(incarnations).__getitem__

        class Late:
            """Another function fails just before the number is read."""

            def __getitem__(self, worker):
                queue.cancel(ValueError("meanwhile"))
                return usual(incarnations, worker)

        coordinated._scheduler._threads[0]._failures.incarnations = Late()
        value = schedule(coordinated, lambda: push(1))
        with pytest.raises(ValueError, match="meanwhile"):
            coordinated.join()
        with pytest.raises(js.CancelledError):
            value.fetch()
        assert coordinated.backend.servers[0].total == 0
        coordinated._scheduler._threads[0]._failures.incarnations = incarnations
        schedule(coordinated, lambda: push(1))


def test_a_worker_that_does_not_come_up_is_given_up_and_the_others_go_on():
    with coordinator(2, max_restarts=2) as coordinated:
        until(lambda: len(coordinated.backend.lives) == 2)
        coordinated.backend.refusals[0] = 100
        coordinated.backend.kill(0)
        until(lambda: activities(coordinated)[0] is Activity.GIVEN_UP)
        with pytest.raises(RuntimeError) as raised:
            coordinated.join()
        text = str(raised.value)
        assert "Worker 0 was lost 3 times within 300 s without finishing" in text
        assert "is not started again" in text and "worker 0 did not come up" in text
        coordinated.join()
        for _ in range(5):
            schedule(coordinated, lambda: push(1))
        coordinated.join()
        assert coordinated.backend.servers[0].total == 5
        with pytest.raises(js.ClosureAbortedError, match="Worker 0 was lost"):
            coordinated._scheduler.on_worker(0, "read", lambda life: 1).fetch()


def test_when_all_workers_are_given_up_that_is_an_error_for_ever():
    with coordinator(1, max_restarts=0) as coordinated:
        until(lambda: len(coordinated.backend.lives) == 1)
        value = None
        coordinated.backend.refusals[0] = 100
        coordinated.backend.kill(0)
        until(lambda: activities(coordinated) == [Activity.GIVEN_UP])
        for call in (
            coordinated.join,
            coordinated.done,
            lambda: schedule(coordinated, deadly),
            coordinated.join,
        ):
            with pytest.raises(RuntimeError, match="Worker 0 was lost 1 times"):
                call()
        assert value is None
        coordinated.join = lambda: None  # the end of this block would raise it again


def test_finished_functions_make_up_for_lost_workers():
    with coordinator(1, max_restarts=1) as coordinated:
        for _ in range(4):
            schedule(coordinated, lambda: push(1))
            coordinated.join()
            lives = len(coordinated.backend.lives)
            coordinated.backend.kill(0)
            until(lambda: len(coordinated.backend.lives) == lives + 1)  # noqa: B023
        assert coordinated.backend.servers[0].total == 4


def test_an_error_that_is_not_the_workers_ends_its_starts():
    with coordinator(1) as coordinated:

        def start(worker, incarnation):
            raise FileNotFoundError("python")

        until(lambda: len(coordinated.backend.lives) == 1)
        coordinated.backend.start = start
        coordinated.backend.kill(0)
        until(lambda: activities(coordinated) == [Activity.GIVEN_UP])
        with pytest.raises(FileNotFoundError, match="python") as raised:
            coordinated.join()
        assert raised.value.__notes__ == ["Worker 0 could not be started."]
        coordinated.join = lambda: None


def test_deaths_are_counted_and_pauses_grow():
    now = [0.0]
    deaths = Deaths(3, 300.0, lambda: now[0])
    assert deaths.pause == 0 and not deaths.are_too_many
    pauses = []
    for _ in range(3):
        deaths.add()
        pauses.append(deaths.pause)
        assert not deaths.are_too_many
    assert pauses == [0.0, 0.2, 0.4]
    now[0] = 299.0
    deaths.add()
    assert deaths.are_too_many
    assert str(deaths) == (
        "4 times within 300 s without finishing a function in between"
    )
    now[0] = 301.0
    deaths.add()  # those of the beginning are too long ago
    assert not deaths.are_too_many
    deaths.forget()
    assert deaths.pause == 0.0
    for _ in range(20):
        deaths.add()
    assert deaths.pause == 5.0


# Servers.


def test_a_lost_server_is_an_error_for_ever():
    """CCO-49, FLT-6, FLT-7: each time, where TensorFlow alternates."""
    with coordinator(2) as coordinated:
        gate = Gate()
        waiting = schedule(coordinated, gate)
        gate.wait_until_entered()
        coordinated.backend.servers[0].is_lost = True
        bad = schedule(coordinated, lambda: push(1))
        with pytest.raises(js.ParameterServerLost):
            bad.fetch()
        gate.open.set()
        for call in (
            coordinated.join,
            coordinated.done,
            lambda: schedule(coordinated, lambda: 1),
            coordinated.join,
            lambda: schedule(coordinated, lambda: 1),
        ):
            with pytest.raises(js.ParameterServerLost, match="the server is gone"):
                call()
        with pytest.raises(js.CancelledError):
            waiting.fetch()
        coordinated.join = lambda: None


def test_a_server_and_a_worker_lost_together():
    """FLT-8"""
    with coordinator(2) as coordinated:
        gate = Gate()
        schedule(coordinated, gate)
        gate.wait_until_entered()
        coordinated.backend.servers[0].is_lost = True
        for index in range(2):
            coordinated.backend.kill(index)
        for _ in range(2):
            with pytest.raises(js.ParameterServerLost):
                coordinated.join()
        coordinated.join = lambda: None
