"""Functions that a coordinator schedules: what they see, and what becomes of it."""

import functools
import gc
import io
import sys
import threading
import types
import weakref

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.clusters import Activity, Cluster, Gate, Status, until
from helpers.threads import Started
from rich.console import Console
from rich.errors import LiveError
from rich.live import Live

import jaxstrategy as js
from jaxstrategy.coordinator import ClusterCoordinator
from jaxstrategy.experimental import embedding_lookup


@pytest.fixture(scope="module")
def shared():
    """Three workers and two servers."""
    with Cluster(3, servers=2) as made:
        yield made


@pytest.fixture
def coordinator(shared):
    """After each test nothing is left to be raised."""
    yield shared.coordinator
    shared.open_all()
    shared.coordinator.join(60)


def test_there_is_one_coordinator_of_a_strategy(shared, coordinator):
    made = shared.strategy
    assert ClusterCoordinator(made) is coordinator
    assert js.experimental.coordinator.ClusterCoordinator(made) is coordinator
    assert coordinator.strategy is made
    assert ClusterCoordinator(made, max_restarts=3) is coordinator
    with pytest.raises(ValueError, match="`max_restarts` was 5, and the strategy has"):
        ClusterCoordinator(made, max_restarts=5)
    for wrong in (-1, 1.5, "3"):
        with pytest.raises(ValueError, match="a number of times was wanted, 0 for"):
            ClusterCoordinator(made, max_restarts=wrong)
    for other in (js.MirroredStrategy(js.simulate(8)[:2]), None):
        with pytest.raises(ValueError, match="Only a `ParameterServerStrategy` has wo"):
            ClusterCoordinator(other)


def test_after_a_coordinator_is_closed_there_may_be_another():
    strategy = js.ParameterServerStrategy(workers=1, backend="threads")
    with strategy.scope():
        total = js.Variable(0.0)
    seen = []
    for _ in range(2):
        with ClusterCoordinator(strategy, max_restarts=1) as coordinator:
            seen.append(coordinator)

            @coordinator.function
            def add(x):
                total.assign_add(x)

            for _ in range(3):
                coordinator.schedule(add, (1.0,))
    assert seen[0] is not seen[1] and float(total) == 6.0
    strategy.close()
    with pytest.raises(RuntimeError, match="The coordinator is closed"):
        coordinator.join()


def test_what_may_be_scheduled(shared, coordinator):
    @shared.strategy.run
    def step(x):
        return js.get_replica_context().all_reduce("sum", x + 1)

    class Model:
        @coordinator.function
        def step(self, x):
            return x + 1

    v = shared.variable(1.0)
    jitted = jax.jit(lambda x: (v.assign_add(x), x + v.value() - 2)[1])
    marked = coordinator.function(lambda x: x + 1)
    for fn in (jitted, step, marked, Model().step):
        assert coordinator.schedule(fn, (2.0,)).fetch() == 3.0
    for wrong in (lambda x: x, len, Model().__init__):
        with pytest.raises(TypeError, match="a plain function.*decorate yours with `@"):
            coordinator.schedule(wrong, (1,))
    for wrong in (None, 3):
        with pytest.raises(TypeError, match="no function"):
            coordinator.schedule(wrong)
    with pytest.raises(TypeError, match="`function` was given 3; a function was"):
        coordinator.function(3)


def test_a_marked_function_is_the_function(coordinator):
    @coordinator.function
    def f(x, *, by=2):
        """Doc."""
        return x * by

    assert f(3) == 6 and f(3, by=3) == 9
    assert f.__name__ == "f" and f.__doc__ == "Doc."
    assert "f, which may be scheduled" in repr(f)
    for args in ((3,), [3]):
        assert coordinator.schedule(f, args, {"by": 4}).fetch() == 12
        assert coordinator.schedule(f, args=args, kwargs={"by": 5}).fetch() == 15
    with pytest.raises(TypeError, match=r"`args` was a ndarray; a list or a tuple .*"):
        coordinator.schedule(f, np.ones(2))
    with pytest.raises(TypeError, match="`kwargs` was a tuple; a dict of the arg"):
        coordinator.schedule(f, (1,), (2,))


def traces(coordinator):
    return coordinator.metrics.function_tracing.count


def test_numbers_are_inputs_and_bools_and_strings_part_of_the_program(coordinator):
    cases = {
        "ints": ([1, 2, 3, 4], 1),
        "NumPy's": ([np.int32(1), np.int32(2)], 1),
        "floats": ([1.5, 2.5], 1),
        "bools": ([True, False, True], 2),
        "strings": (["a", "b", "a"], 2),
        "shapes": ([np.ones(2), np.ones(2), np.ones(3)], 2),
    }
    for name, (arguments, expected) in cases.items():
        before = traces(coordinator)
        f = coordinator.function(lambda x, case=name: (x, 0))
        values = [coordinator.schedule(f, (x,)) for x in arguments]
        coordinator.join()
        assert traces(coordinator) - before == expected, name
        for found, given in zip(values, arguments, strict=True):
            np.testing.assert_array_equal(found.fetch()[0], given, err_msg=name)


class Scaled:
    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return self.k * x

    def method(self, x):
        return self(x)


SETTINGS = Scaled(0.0)


def test_what_a_function_refers_to_is_never_stale_and_programs_are_shared(
    shared, coordinator
):
    made = shared.strategy

    def scale(k, x):
        return k * x

    def with_object(k):
        SETTINGS.k = k
        return lambda x: SETTINGS.k * x

    kept = Scaled(0.0)

    def with_attribute(k):
        kept.k = k
        return kept.method

    def with_callable(k):
        kept.k = k
        return kept

    marked = coordinator.function(Scaled.method)

    def with_wrapper(k):
        method = types.MethodType(marked, Scaled(k))
        return lambda x: method(x)

    ways = {
        "closure": lambda k: lambda x: k * x,
        "list": lambda k: (lambda scales: lambda x: scales[0] * x)([k]),
        "default": lambda k: lambda x, k=k: k * x,
        "partial": lambda k: functools.partial(scale, k),
        "global object": with_object,
        "attribute": with_attribute,
        "new method": lambda k: Scaled(k).method,
        "callable": with_callable,
        "wrapped method": with_wrapper,
        "step": lambda k: made.run(lambda x: k * x),
        "step of a method": lambda k: made.run(with_attribute(k)),
    }
    for name, make in ways.items():
        seen = []
        for k in (2.0, 7.0, 2.0, 7.0):
            fn = make(k)
            if not isinstance(fn, type(made.run(scale))):
                fn = coordinator.function(fn)
            assert coordinator.schedule(fn, (1.0,)).fetch() == k, name
            seen.append(traces(coordinator))
        assert seen[1] == seen[3], name


def test_a_result_is_no_argument(coordinator):
    f = coordinator.function(lambda x: x)
    first = coordinator.schedule(f, (1.0,))
    for args, kwargs in (((first,), {}), (({"a": [first]},), {}), ((), {"x": first})):
        with pytest.raises(TypeError, match="was a `RemoteValue`, which has its resul"):
            coordinator.schedule(f, args, kwargs)
    assert coordinator.schedule(f, (first.get(),)).fetch() == 1.0


def test_an_error_in_the_trace_comes_from_schedule(shared, coordinator):
    v = shared.variable(0)

    def function():
        v.assign_add(1)
        raise KeyError("in the trace")

    with pytest.raises(KeyError, match="in the trace"):
        shared.schedule(function)
    coordinator.join()
    assert float(v) == 0
    with pytest.raises(ValueError, match="Make it outside the step"):
        shared.schedule(lambda: js.Variable(1.0).value())
    own = js.Variable(1.0, name="own")
    with pytest.raises(js.errors.ContextError, match="'own', which was not made in th"):
        shared.schedule(lambda: own.value())
    inner = coordinator.function(lambda: 1)
    calls = lambda: coordinator.schedule(inner), coordinator.join, coordinator.done
    for call, name in zip(calls, ("schedule", "join", "done"), strict=True):
        with pytest.raises(RuntimeError, match=f"`{name}` was called by code that run"):
            shared.schedule(lambda call=call: call())
    assert shared(lambda: 1) == 1


def test_results_have_the_structure_of_what_was_returned(coordinator):
    """COO-2, CCO-10"""

    @coordinator.function
    def f(x):
        return 2 * x, (x + 2, 4), [jnp.full(2, 5)], {"v": x, "none": None, "s": "text"}

    two, (three, four), [fives], named = coordinator.schedule(f, (1,)).fetch()
    assert (two, three, four) == (2, 3, 4) and type(two) is np.int32
    np.testing.assert_array_equal(fives, [5, 5])
    assert named == {"v": 1, "none": None, "s": "text"}
    remote = coordinator.schedule(f, (1,))
    got = remote.get()
    assert isinstance(got[0], jax.Array) and remote.get() is got
    coordinator.join()  # None among results poisons nothing


def test_results_cannot_be_changed_and_keep_what_variables_held(shared, coordinator):
    """CCO-13, CCO-67"""
    v = shared.variable(1.0)

    def add():
        v.assign_add(1)
        return v.value(), jnp.zeros(2)

    value = shared.schedule(add)
    number, array = value.fetch()
    assert number == float(v) == 2.0
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    v.assign(50.0)
    assert value.fetch()[0] == 2.0
    np.testing.assert_array_equal(value.get()[1], [0, 0])


def test_who_asks_waits_for_its_own_function_only(shared, coordinator):
    gate = Gate(shared)
    slow = shared.schedule(gate.fn, 5.0)
    gate.until_entered()
    assert slow.status is Status.NOT_READY and not coordinator.done()
    assert repr(slow).endswith(": NOT_READY>")
    found = []
    thread = threading.Thread(target=lambda: found.append(slow.get()))
    thread.start()
    quick = shared.schedule(lambda: 4)
    assert quick.fetch() == 4 and not found
    assert coordinator.fetch({"a": quick, "b": [7, "x", None, quick], "c": ()}) == {
        "a": 4,
        "b": [7, "x", None, 4],
        "c": (),
    }
    array = jnp.ones(2)
    assert coordinator.fetch(array) is array and coordinator.fetch(None) is None
    gate.open.set()
    thread.join(60)
    assert found == [5.0] and slow.status is Status.READY
    coordinator.join(), coordinator.join()
    assert coordinator.done()


def test_an_error_of_a_host_callback_is_of_its_own_type(shared, coordinator):
    """CCO-31, where TensorFlow has an UnknownError."""

    counter = shared.variable(0)

    class Own(Exception):
        pass

    def host(x):
        if x > 1:
            raise Own(f"from the host, of {x}")
        return np.float32(x)

    @coordinator.function
    def f(x):
        counter.assign_add(1)
        return jax.experimental.io_callback(
            host, jax.ShapeDtypeStruct((), jnp.float32), x
        )

    assert coordinator.schedule(f, (1.0,)).fetch() == 1.0
    coordinator.schedule(f, (2.0,))
    with pytest.raises(Own, match="from the host, of 2.0") as raised:
        coordinator.join()
    assert any(entry.name == "host" for entry in raised.traceback)
    assert float(counter) == 1
    assert coordinator.schedule(f, (0.5,)).fetch() == 0.5


def test_the_states_of_workers_and_what_runs_where(shared, coordinator):
    """CCO-57, COO-36"""
    shared.until_idle()
    gate, before = Gate(shared), coordinator.metrics
    values = [shared.schedule(gate.fn) for _ in range(5)]
    gate.until_entered(3)
    name = coordinator.workers[0].function
    assert name.startswith("<lambda>_") and coordinator.workers[0].seconds > 0
    assert shared.activities() == [Activity.RUNNING] * 3
    metrics = coordinator.metrics
    assert (metrics.queued_closures, metrics.inflight_closures) == (2, 3)
    with pytest.raises(TimeoutError) as raised:
        coordinator.join(timeout=0.01)
    first, *lines = str(raised.value).splitlines()
    assert first == "Functions have not ended after 0.01 seconds: 3 run, 2 are queued."
    for number, line in enumerate(lines):
        assert line.startswith(f"  worker {number}: running, `{name}` for ")
    assert "&lt;lambda&gt;_" in coordinator.workers._repr_html_()
    gate.open.set()
    coordinator.join(timeout=60)
    values[0].fetch(), values[0].get(), values[1].get()
    metrics = coordinator.metrics
    assert metrics.queued_closures == metrics.inflight_closures == 0
    times = metrics.closure_execution
    assert times.count - before.closure_execution.count == 5
    assert 0 < times.min <= times.mean <= times.max <= times.sum
    found = metrics.remote_value_fetch.count - before.remote_value_fetch.count
    assert found == 2 and "0 queued, 0 running" in repr(coordinator)
    shared.schedule(shared.raising(ValueError("<no>\nmore")))
    with pytest.raises(ValueError):
        coordinator.join()
    (state,) = [each for each in coordinator.workers if "<no>" in each.error]
    assert state.error == "ValueError: <no>\nmore"
    assert str(state) == f"worker {state.index}: idle; last error: ValueError: <no>"
    assert "ValueError: &lt;no&gt;" in coordinator.workers._repr_html_()


def test_workers_begin_one_after_the_other_if_they_are_told_to(monkeypatch):
    monkeypatch.setenv("TF_COORDINATOR_SCHEDULE_START_DELAY", "600")
    monkeypatch.setenv("TF_COORDINATOR_SCHEDULE_START_DELAY_MAX", "400")
    with Cluster(3) as cluster:
        for _ in range(4):
            cluster.schedule(cluster.add)
        cluster.coordinator.join(60)
        assert cluster.sum() == 4.0 and cluster.starts() == [1, 0, 0]


@pytest.fixture
def threads():
    """Those of coordinators of the test, which end with it."""
    found = Started("jaxstrategy worker")
    yield found
    gc.collect()
    until(lambda: not found())


def test_a_coordinator_that_nobody_has_ends_its_threads(threads):
    """When what was scheduled has ended; results that were fetched stay."""

    def made():
        strategy = js.ParameterServerStrategy(workers=3, backend="threads")
        with strategy.scope():
            table = js.Variable(jnp.ones((2, 2)))
        coordinator = ClusterCoordinator(strategy)
        look_up = coordinator.function(lambda row: embedding_lookup(table, row))
        values = [coordinator.schedule(look_up, (np.array([1]),)) for _ in range(20)]
        coordinator.fetch(values[:5])
        assert len(threads()) == 3
        return weakref.ref(coordinator), values[:5]

    gone, values = made()
    until(lambda: (gc.collect(), gone())[1] is None)
    until(lambda: not threads())
    assert all(value.fetch().tolist() == [[1, 1]] for value in values)


def test_close_cancels_what_is_queued_and_ends_what_runs(threads):
    with Cluster(1) as cluster:
        gate = Gate(cluster)
        values = [cluster.schedule(gate.fn) for _ in range(3)]
        gate.until_entered()
        raised = []

        def join():
            with pytest.raises(RuntimeError, match="is closed"):
                cluster.coordinator.join()
            raised.append(1)

        waiting = threading.Thread(target=join)
        waiting.start()
        cluster.coordinator.close()
        waiting.join(60)
        assert raised
        gate.open.set()
        for value in values:
            with pytest.raises(js.errors.CancelledError):
                value.fetch()
        calls = cluster.coordinator.join, cluster.coordinator.done
        for call in (*calls, lambda: cluster.schedule(cluster.add)):
            with pytest.raises(RuntimeError, match="closed: it runs no functions any"):
                call()
        until(lambda: cluster.activities() == [Activity.CLOSED])
        cluster.coordinator.close()


def test_a_block_waits_for_what_was_scheduled_or_closes_at_once(threads):
    with Cluster(2) as cluster:
        with cluster.coordinator:
            values = [cluster.schedule(cluster.add) for _ in range(10)]
        assert cluster.sum() == 10 and all(value.fetch() for value in values)
        assert not threads()
    for error in (KeyError("mine"), None):
        with Cluster(1) as cluster:
            with pytest.raises(KeyError, match="mine"), cluster.coordinator:
                if error is not None:
                    raise error
                cluster.schedule(cluster.raising(KeyError("mine")))


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=120)


def test_the_live_table_shows_the_workers_where_somebody_looks(shared, monkeypatch):
    console, gate = terminal(), Gate(shared)
    with shared.coordinator.progress("train", console=console):
        for _ in range(5):
            shared.schedule(gate.fn)
        gate.until_entered(3)
        until(lambda: " for " in console.file.getvalue())
        gate.open.set()
        shared.coordinator.join()
    last = console.file.getvalue().rpartition("train: ")[2]
    assert last.startswith("5 finished, 0 queued, 0 running") and "functions/s" in last
    for word in ("worker", "state", "starts", "functions", "last error", "idle"):
        assert word in last
    silent = Console(file=io.StringIO())
    with shared.coordinator.progress(console=silent) as table:
        shared(shared.add)
    assert silent.file.getvalue() == "" and str(table).startswith("1 finished, 0 q")
    console = terminal()
    with pytest.raises(KeyError, match="mine"):
        with shared.coordinator.progress(console=console):
            raise KeyError("mine")
    with shared.coordinator.progress(console=console):  # the first one has ended
        pass

    def start(self, refresh=False):
        raise LiveError("Only one live display may be active at once")

    monkeypatch.setattr(Live, "start", start)
    with shared.coordinator.progress(console=terminal()):
        assert shared(shared.add, 2.0) == 2.0
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with shared.coordinator.progress():
        assert shared(shared.add, 3.0) == 3.0
