"""What a coordinator schedules runs once on some worker, and gives its results back."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fake_workers
from helpers.fake_workers import Gate, coordinator, here, push

import jaxstrategy as js
from jaxstrategy.coordinator import _scheduler
from jaxstrategy.coordinator._cluster_coordinator import ClusterCoordinator
from jaxstrategy.coordinator._schedulable import check_schedulable
from jaxstrategy.parameter_servers._element_changed import ElementChanged
from jaxstrategy.parameter_servers._operations import CallNumber


def marked(fn):
    """As a coordinator marks it, whichever that is."""
    return ClusterCoordinator.function(None, fn)


@pytest.fixture(params=[{}, {"limit": 2}], ids=["", "limit 2"])
def coordinated(request):
    """COO-17: all the same with a queue that has room for two."""
    with coordinator(3, **request.param) as made:
        yield made


def test_a_function_runs_and_its_results_come_back_in_their_structure(coordinated):
    @coordinated.function
    def f(x):
        return x + 1, (np.float32(3), 4), [np.arange(2)], {"v": None, "s": "text"}

    value = coordinated.schedule(f, (np.int32(1),))
    assert isinstance(value, js.coordinator.RemoteValue)
    one, (three, four), [array], named = value.fetch()
    assert type(one) is np.int32 and (one, three, four) == (2, 3, 4)
    assert type(three) is np.float32
    np.testing.assert_array_equal(array, [0, 1])
    assert named == {"v": None, "s": "text"}
    got = value.get()
    assert isinstance(got[0], jax.Array) and value.get() is got


@pytest.mark.parametrize("wrong", [lambda x: x, None, 3, len])
def test_what_is_no_compiled_function_is_refused(coordinated, wrong):
    match = "no function" if not callable(wrong) else "decorate yours with `@coordi"
    with pytest.raises(TypeError, match=match):
        coordinated.schedule(wrong, (1,))
    assert coordinated.schedule(coordinated.function(lambda: 1)).fetch() == 1


def test_jitted_functions_steps_and_marked_functions_and_methods_may_be_scheduled():
    strategy = js.MirroredStrategy(js.simulate(8)[:2])

    class Model:
        @marked
        def step(self, x):
            return x

    for fn in (
        jax.jit(jnp.sin),
        strategy.run(jnp.sin),
        marked(jnp.sin),
        Model().step,
    ):
        check_schedulable(fn)
    with pytest.raises(TypeError, match="a plain function"):
        check_schedulable(Model().__init__)


def test_a_marked_function_is_the_function():
    @marked
    def f(x, *, by=2):
        """Doc."""
        return x * by

    assert f(3) == 6 and f(3, by=3) == 9
    assert f.__name__ == "f" and f.__doc__ == "Doc."
    assert "f, which may be scheduled" in repr(f)
    with pytest.raises(TypeError, match="`function` was given 3; a function was"):
        marked(3)


@pytest.mark.parametrize("args", [(3,), [3]])
def test_arguments_by_place_and_by_name(coordinated, args):
    f = coordinated.function(lambda x, y: x - y)
    assert coordinated.schedule(f, args, {"y": 4}).fetch() == -1
    assert coordinated.schedule(f, args=args, kwargs={"y": 5}).fetch() == -2


def test_an_array_is_no_list_of_arguments(coordinated):
    f = coordinated.function(lambda x: x)
    with pytest.raises(TypeError, match=r"`args` was a ndarray; a list or a tuple .*"):
        coordinated.schedule(f, np.ones(2))
    with pytest.raises(TypeError, match="`kwargs` was a tuple; a dict of the arg"):
        coordinated.schedule(f, (1,), (2,))
    coordinated.join()


def test_join_with_nothing_and_again_and_again(coordinated):
    assert coordinated.join() is None and coordinated.join() is None
    assert coordinated.done() is True
    coordinated.schedule(coordinated.function(lambda: push(1)))
    coordinated.join(), coordinated.join(), coordinated.join()
    assert coordinated.done() and coordinated.backend.servers[0].total == 1


def test_all_workers_run_functions_at_a_time(coordinated):
    gate = Gate()
    value = [coordinated.schedule(coordinated.function(gate)) for _ in range(3)][0]
    gate.wait_until_entered(3)
    assert not coordinated.done()
    assert value.status is js.coordinator.RemoteValueStatus.NOT_READY
    states = coordinated.workers
    assert [state.activity.value for state in states] == ["running"] * 3
    gate.open.set()
    coordinated.join()
    assert coordinated.done()
    assert value.status is js.coordinator.RemoteValueStatus.READY


def test_functions_run_although_nobody_keeps_their_results(coordinated):
    for _ in range(5):
        coordinated.schedule(coordinated.function(lambda: push(1)))
    coordinated.join()
    assert coordinated.backend.servers[0].total == 5


def test_many_threads_schedule_and_join(coordinated):
    def schedule():
        for _ in range(10):
            coordinated.schedule(coordinated.function(lambda: push(1)))

    joined = []
    threads = [threading.Thread(target=schedule) for _ in range(4)]
    threads += [
        threading.Thread(target=lambda: joined.append(coordinated.join()))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    coordinated.join()
    assert joined == [None] * 3 and coordinated.backend.servers[0].total == 40


def test_fetch_fills_in_what_is_remote_and_leaves_the_rest(coordinated):
    value = coordinated.schedule(coordinated.function(lambda: np.int32(2)))
    found = coordinated.fetch({"a": value, "b": [7, "x", None, value], "c": ()})
    assert found == {"a": 2, "b": [7, "x", None, 2], "c": ()}
    array = jnp.ones(2)
    assert coordinated.fetch(5) == 5 and coordinated.fetch([]) == []
    assert coordinated.fetch(None) is None and coordinated.fetch(array) is array
    assert coordinated.fetch(value) == 2


def test_fetch_waits_for_its_own_function_only(coordinated):
    gate = Gate()
    slow = coordinated.schedule(coordinated.function(gate))
    gate.wait_until_entered()
    quick = coordinated.schedule(coordinated.function(lambda: 4))
    assert quick.fetch() == 4 and not coordinated.done()
    gate.open.set()
    assert slow.fetch() == 0


def test_the_end_of_an_iterator_is_the_same_error_wherever_it_is_raised(coordinated):
    error = js.OutOfRangeError("the end")

    def f():
        raise error

    bad = coordinated.schedule(coordinated.function(f))
    for call in (
        bad.fetch,
        bad.get,
        lambda: coordinated.fetch([bad]),
        coordinated.join,
    ):
        with pytest.raises(js.OutOfRangeError) as raised:
            call()
        assert raised.value is error


def test_a_program_is_defined_once_for_each_worker(coordinated):
    f = coordinated.function(lambda x: x)
    for _ in range(20):
        coordinated.schedule(f, (1,))
    coordinated.join()
    defined = coordinated.backend.defined
    assert len(defined) == len(set(defined)) <= 3


def test_calls_say_whose_they_are(coordinated):
    numbers = []

    def f():
        numbers.append(here.call.number)
        assert here.call.number.worker == here.worker.index

    for _ in range(10):
        coordinated.schedule(coordinated.function(f))
    coordinated.join()
    functions = [number.function for number in numbers]
    assert len(set(functions)) == 10
    assert all(number.finished <= number.function for number in numbers)
    coordinated.schedule(coordinated.function(f))
    coordinated.join()
    # All that came before have ended: a server need not remember them.
    assert numbers[-1].finished == numbers[-1].function > max(functions[:10])


def test_schedule_within_a_scheduled_function_is_refused(coordinated):
    def f():
        for call in (
            lambda: coordinated.schedule(coordinated.function(lambda: 1)),
            coordinated.join,
            coordinated.done,
        ):
            with pytest.raises(RuntimeError, match="runs for a scheduled function"):
                call()

    coordinated.schedule(coordinated.function(f))
    coordinated.join()


def test_an_error_in_tracing_comes_from_schedule_itself(coordinated):
    def prepare(fn, args, kwargs):
        raise ValueError("shapes")

    usual, coordinated.tracer.prepare = coordinated.tracer.prepare, prepare
    with pytest.raises(ValueError, match="shapes"):
        coordinated.schedule(coordinated.function(lambda: 1))
    coordinated.tracer.prepare = usual
    coordinated.join()
    assert coordinated.schedule(coordinated.function(lambda: 1)).fetch() == 1


def test_functions_are_prepared_in_the_callers_thread(coordinated):
    threads = []
    usual = coordinated.tracer.prepare

    def prepare(fn, args, kwargs):
        threads.append(threading.current_thread())
        return usual(fn, args, kwargs)

    coordinated.tracer.prepare = prepare
    coordinated.schedule(coordinated.function(lambda: 1))
    assert threads == [threading.current_thread()]


def test_elements_of_another_type_are_traced_for_and_run_on_the_same_worker():
    with coordinator(2) as coordinated:
        ran = []

        def old():
            ran.append(here.worker.index)
            raise ElementChanged(0, ("*", (((3,), "float32"),)))

        def new():
            ran.append(here.worker.index)
            return np.int32(7)

        def again(prepared, changed):
            return coordinated.tracer.prepare(new, (), {})

        coordinated.tracer.again = again
        value = coordinated.schedule(coordinated.function(old))
        assert value.fetch() == 7
        assert len(ran) == 2 and ran[0] == ran[1]
        (changed,) = coordinated.tracer.changes
        assert changed.iterator == 0


def test_an_error_of_tracing_again_is_the_functions(monkeypatch):
    def old():
        raise ElementChanged(0, ("*", ()))

    def again(prepared, changed):
        raise TypeError("no such shape")

    with coordinator(1) as coordinated:
        coordinated.tracer.again = again
        coordinated.schedule(coordinated.function(old))
        with pytest.raises(TypeError, match="no such shape"):
            coordinated.join()


# Evaluation.


@pytest.mark.parametrize("shards", [None, 1, 7])
def test_evaluate_adds_up_what_the_shards_return(shards):
    data = np.arange(103, dtype=np.float32)
    with coordinator(2) as coordinated:
        seen = []

        @coordinated.function
        def evaluate(shard, count):
            seen.append((int(shard), int(count)))
            part = data[shard::count]
            return {"sum": part.sum(), "rows": np.int32(len(part)), "two": part[:1] * 0}

        found = coordinated.evaluate(evaluate, shards)
        count = 10 if shards is None else shards
        assert sorted(seen) == [(shard, count) for shard in range(count)]
        assert found["sum"] == data.sum() and found["rows"] == 103
        assert found["sum"].dtype == np.float32 and found["rows"].dtype == np.int32
        assert found["two"].shape == (1,)


def test_evaluate_counts_each_shard_once_although_workers_are_lost():
    with coordinator(2) as coordinated:
        died = []

        @coordinated.function
        def evaluate(shard, count):
            if shard in (1, 4) and shard not in died:
                died.append(int(shard))
                here.worker.kill()
            return np.int32(2**shard)

        assert coordinated.evaluate(evaluate, 6) == 2**6 - 1
        assert died == [1, 4] or died == [4, 1]


def test_evaluate_refuses_what_has_no_sum_and_no_shards():
    with coordinator(1) as coordinated:
        f = coordinated.function(lambda shard, count: "text")
        with pytest.raises(TypeError, match="returned 'text'; sums of numbers were"):
            coordinated.evaluate(f, 2)
        for wrong in (0, -1, 1.5):
            with pytest.raises(ValueError, match="at least one shard was wanted"):
                coordinated.evaluate(f, wrong)


def test_evaluate_raises_the_first_error():
    with coordinator(1) as coordinated:

        @coordinated.function
        def evaluate(shard, count):
            if shard == 1:
                raise KeyError("shard 1")
            return 1.0

        with pytest.raises(KeyError, match="shard 1"):
            coordinated.evaluate(evaluate, 3)
        coordinated.join()


def test_workers_begin_one_after_the_other_if_they_are_told_to(monkeypatch):
    monkeypatch.setenv("TF_COORDINATOR_SCHEDULE_START_DELAY", "2")
    assert [_scheduler._start_delay(i) for i in range(4)] == [0, 2, 4, 6]
    monkeypatch.setenv("TF_COORDINATOR_SCHEDULE_START_DELAY_MAX", "4")
    assert [_scheduler._start_delay(i) for i in range(4)] == [0, 2, 4, 4]
    monkeypatch.setenv("TF_COORDINATOR_SCHEDULE_START_DELAY", "0.02")
    with coordinator(3) as coordinated:
        for _ in range(6):
            coordinated.schedule(coordinated.function(lambda: push(1)))
        coordinated.join()
        assert coordinated.backend.servers[0].total == 6


def test_fakes_drop_what_is_pushed_twice():
    """What the other tests rely on."""
    server = fake_workers.Server()
    assert server.push(1, CallNumber(0)) and not server.push(1, CallNumber(0))
    server.fence(2, 1)
    assert not server.push(1, CallNumber(1, 0, 2, 0))
    assert server.push(1, CallNumber(1, 0, 2, 1)) and server.total == 2
