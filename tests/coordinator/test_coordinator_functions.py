"""Scheduled functions that are traced for real, on workers that are threads."""

import functools
import gc
import threading
import types
import weakref

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.threads import until

import jaxstrategy as js
from jaxstrategy.coordinator import ClusterCoordinator


@pytest.fixture(scope="module")
def made():
    """Three workers and two servers, for all tests here."""
    strategy = js.ParameterServerStrategy(
        workers=3, parameter_servers=2, backend="threads"
    )
    yield strategy
    strategy.close()


@pytest.fixture
def coordinator(made):
    """Their coordinator; after each test nothing is left to be raised."""
    found = ClusterCoordinator(made)
    yield found
    found.join()


@pytest.fixture
def counter(made):
    with made.scope():
        return js.Variable(0, name="counter", dtype=jnp.int32)


@pytest.fixture
def failing(made, coordinator):
    """A function that changes `counter` by 100 if its row is there, and else fails."""
    with made.scope():
        table = js.Variable(jnp.zeros((4, 2)), name="table")

    @coordinator.function
    def look_up(row, counter=None):
        if counter is not None:
            counter.assign_add(100)
        table.scatter_add(js.IndexedSlices(jnp.ones((1, 2)), row[None]))

    return look_up


def value(variable):
    return variable.value().item()


# Which coordinator.


def test_there_is_one_coordinator_of_a_strategy(made, coordinator):
    assert ClusterCoordinator(made) is coordinator
    assert js.experimental.coordinator.ClusterCoordinator(made) is coordinator
    assert coordinator.strategy is made
    assert ClusterCoordinator(made, max_restarts=3) is coordinator
    with pytest.raises(ValueError, match="`max_restarts` was 5, and the strategy has"):
        ClusterCoordinator(made, max_restarts=5)
    for wrong in (-1, 1.5, "3"):
        with pytest.raises(ValueError, match="a number of times was wanted, 0 for"):
            ClusterCoordinator(made, max_restarts=wrong)


@pytest.mark.parametrize(
    "strategy", [lambda: js.MirroredStrategy(js.simulate(8)[:2]), lambda: None]
)
def test_other_strategies_have_none(strategy):
    with pytest.raises(ValueError, match="Only a `ParameterServerStrategy` has worker"):
        ClusterCoordinator(strategy())


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
    assert seen[0] is not seen[1] and value(total) == 6.0
    strategy.close()
    with pytest.raises(RuntimeError, match="The coordinator is closed"):
        coordinator.join()


def test_without_references_a_coordinator_and_its_strategy_end():
    strategy = js.ParameterServerStrategy(workers=2, backend="threads")
    coordinator = ClusterCoordinator(strategy)
    threads = [thread._thread for thread in coordinator._scheduler._threads]
    result = coordinator.schedule(jax.jit(lambda: 1)).fetch()
    gone = weakref.ref(coordinator)
    del strategy, coordinator
    gc.collect()
    assert result == 1 and gone() is None
    until(lambda: not any(thread.is_alive() for thread in threads))


# What may be scheduled, and how often it is traced.


def test_jitted_functions_steps_and_marked_functions(made, coordinator):
    @made.run
    def step(x):
        return js.get_replica_context().all_reduce("sum", x + 1)

    for fn in (jax.jit(lambda x: x + 1), step, coordinator.function(lambda x: x + 1)):
        assert coordinator.schedule(fn, (2.0,)).fetch() == 3.0


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


def test_a_function_is_traced_in_the_callers_thread_once_for_all_workers(coordinator):
    calls = []

    @coordinator.function
    def f(x):
        calls.append(threading.current_thread())
        return x

    values = [coordinator.schedule(f, (float(i),)) for i in range(12)]
    assert calls == [threading.current_thread()]
    assert coordinator.fetch(values) == list(range(12)) and len(calls) == 1


def test_a_method_is_traced_once_for_each_object(coordinator):
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @coordinator.function
        def step(self, x):
            return self.scale * x

    before = traces(coordinator)
    models = [Model(2.0), Model(3.0)]
    for _ in range(3):
        found = [coordinator.schedule(m.step, (2.0,)).fetch() for m in models]
        assert found == [4.0, 6.0]
    assert traces(coordinator) - before == 2


class Scaled:
    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return self.k * x

    def method(self, x):
        return self(x)


SETTINGS = Scaled(0.0)


def test_what_a_function_refers_to_is_never_stale_and_programs_are_shared(
    made, coordinator
):
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


def test_a_marked_method_sees_attributes_that_have_changed(coordinator):
    scaled = Scaled(2.0)
    method = coordinator.function(scaled.method)
    for k in (2.0, 7.0):
        scaled.k = k
        assert coordinator.schedule(method, (1.0,)).fetch() == k


def test_what_a_trace_notes_is_noted_for_each_function(coordinator):
    def noted():
        seen = []

        def function(x):
            seen.append(x.shape)
            return x

        marked = coordinator.function(function)
        for _ in range(2):
            coordinator.schedule(marked, (jnp.ones(3),)).fetch()
        return seen

    assert noted() == noted() == [(3,)]


def test_an_error_in_the_trace_comes_from_schedule(coordinator, counter):
    def f():
        counter.assign_add(1)
        raise KeyError("in the trace")

    with pytest.raises(KeyError, match="in the trace"):
        coordinator.schedule(coordinator.function(f))
    coordinator.join()
    assert value(counter) == 0
    assert coordinator.schedule(jax.jit(lambda: 1)).fetch() == 1


def test_schedule_within_a_scheduled_function_is_refused(coordinator):
    inner = coordinator.function(lambda: 1)

    @coordinator.function
    def f():
        return coordinator.schedule(inner)

    with pytest.raises(RuntimeError, match="`schedule` was called by code that runs"):
        coordinator.schedule(f)


def test_a_result_is_no_argument(coordinator):
    f = coordinator.function(lambda x: x)
    first = coordinator.schedule(f, (1.0,))
    for args, kwargs in (((first,), {}), (({"a": [first]},), {}), ((), {"x": first})):
        with pytest.raises(
            TypeError, match="was a `RemoteValue`, which has its results"
        ):
            coordinator.schedule(f, args, kwargs)
    assert coordinator.schedule(f, (first.get(),)).fetch() == 1.0


# Results.


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


def test_a_result_keeps_what_a_variable_held(coordinator, counter):
    """CCO-13"""
    counter.assign(1)

    @coordinator.function
    def f():
        return counter.value()

    found = coordinator.schedule(f)
    coordinator.join()
    counter.assign(50)
    assert found.fetch() == 1


def test_results_may_be_random_keys_and_half_precision(coordinator):
    @coordinator.function
    def f(key):
        a, b = jax.random.split(key)
        return a, jax.random.uniform(b, (), jnp.bfloat16)

    key = jax.random.key(3)
    own, number = coordinator.schedule(f, (key,)).get()
    a, b = jax.random.split(key)
    np.testing.assert_array_equal(jax.random.key_data(own), jax.random.key_data(a))
    assert number == jax.random.uniform(b, (), jnp.bfloat16)
    assert number.dtype == jnp.bfloat16


def test_what_was_fetched_is_visible_to_all(coordinator, counter):
    """CCO-67"""

    @coordinator.function
    def add():
        counter.assign_add(1)
        return counter.value()

    for expected in range(1, 6):
        assert coordinator.schedule(add).fetch() == expected
        assert value(counter) == expected


# Changes of variables.


def test_all_that_is_scheduled_counts(coordinator, counter):
    @coordinator.function
    def add(x):
        counter.assign_add(x)

    def schedule():
        for _ in range(10):
            coordinator.schedule(add, (1,))

    threads = [threading.Thread(target=schedule) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    coordinator.join()
    assert value(counter) == 40


def test_several_steps_in_a_function_are_as_many_functions(made, coordinator):
    """CCO-64"""
    with made.scope():
        at_once, one_by_one = js.Variable(1.0), js.Variable(1.0)

    def step(variable):
        variable.assign(variable.value() * 1.5 + 1)

    @coordinator.function
    def four():
        for _ in range(4):
            step(at_once)

    one = coordinator.function(lambda: step(one_by_one))
    coordinator.schedule(four)
    for _ in range(4):
        coordinator.schedule(one)
        coordinator.join()
    assert value(at_once) == value(one_by_one) == 1.5**4 + 1.5**3 + 1.5**2 + 1.5 + 1


@pytest.mark.parametrize("is_within", [False, True])
def test_run_and_reduce_in_a_function(made, coordinator, is_within):
    """COO-30, of workers with one replica: (4N, 2N)"""
    with made.scope():
        variable = js.Variable(1.0)

    @coordinator.function
    def f(x):
        locals_ = made.run(lambda x: (x + variable.value(), x - 1.0), (x,))
        return tuple(made.reduce("sum", each) for each in locals_)

    if is_within:
        with made.scope():
            found = coordinator.schedule(f, (3.0,))
    else:
        found = coordinator.schedule(f, (3.0,))
    assert found.fetch() == (4.0, 2.0)


@pytest.fixture(scope="module")
def pairs():
    """Workers with two devices each."""
    backend = js.coordinator.Threads(2, 1, devices_per_worker=2)
    made = js.ParameterServerStrategy(backend=backend)
    yield made
    made.close()


def test_all_replicas_of_a_worker_run(pairs):
    """COO-30: (4N, 2N)"""
    with pairs.scope():
        variable = js.Variable(1.0)
    coordinator = ClusterCoordinator(pairs)

    @coordinator.function
    def f(x):
        each = pairs.run(lambda x: (x + variable.value(), x - 1.0), (x,))
        return tuple(pairs.reduce("sum", one) for one in each)

    assert coordinator.schedule(f, (3.0,)).fetch() == (8.0, 4.0)


def test_the_first_replica_changes_a_variable_once_for_each_function(pairs):
    """COO-31"""
    with pairs.scope():
        variable = js.Variable(0.0, aggregation="only_first_replica")
    coordinator = ClusterCoordinator(pairs)

    @coordinator.function
    def f():
        pairs.run(lambda: variable.assign_add(3.0))

    for _ in range(2):
        coordinator.schedule(f)
    coordinator.join()
    assert value(variable) == 6.0


def test_what_the_replicas_assign_is_summed(pairs):
    """COO-32"""
    with pairs.scope():
        variable = js.Variable(0.0, aggregation="sum")
    coordinator = ClusterCoordinator(pairs)

    @coordinator.function
    def f():
        def assign():
            replica = js.get_replica_context().replica_id_in_sync_group
            variable.assign(jnp.float32(replica + 1))

        pairs.run(assign)

    coordinator.schedule(f)
    coordinator.join()
    assert value(variable) == 1 + 2


def test_evaluation_between_two_joins_sees_one_state(coordinator, counter):
    """CCO-61"""

    @coordinator.function
    def add():
        counter.assign_add(1)

    @coordinator.function
    def evaluate(shard, shards):
        return counter.value(), shard, 1

    for _ in range(10):
        coordinator.schedule(add)
    coordinator.join()
    total, shards, count = coordinator.evaluate(evaluate)
    assert (total, shards, count) == (150, sum(range(15)), 15)


# Errors.


def test_a_function_that_fails_has_changed_nothing(coordinator, counter, failing):
    """CCO-29"""
    good = coordinator.schedule(failing, (1,), {"counter": None})
    assert good.fetch() is None
    counted = coordinator.function(lambda row: failing(row, counter))
    bad = coordinator.schedule(counted, (7,))
    for call in (bad.fetch, coordinator.join):
        with pytest.raises(IndexError, match="7") as raised:
            call()
    assert value(counter) == 0
    error = raised.value
    with pytest.raises(IndexError) as again:
        bad.fetch()
    assert again.value is error
    coordinator.schedule(counted, (3,))
    coordinator.join()
    assert value(counter) == 100


@pytest.mark.parametrize("callback", ["pure_callback", "io_callback"])
def test_an_error_of_a_host_callback_is_of_its_own_type(coordinator, counter, callback):
    """CCO-31, where TensorFlow has an UnknownError."""

    class Own(Exception):
        pass

    def host(x):
        if x > 1:
            raise Own(f"from the host, of {x}")
        return np.float32(x)

    called = {
        "pure_callback": jax.pure_callback,
        "io_callback": jax.experimental.io_callback,
    }[callback]

    @coordinator.function
    def f(x):
        counter.assign_add(1)
        return called(host, jax.ShapeDtypeStruct((), jnp.float32), x)

    assert coordinator.schedule(f, (1.0,)).fetch() == 1.0
    coordinator.schedule(f, (2.0,))
    with pytest.raises(Own, match="from the host, of 2.0") as raised:
        coordinator.join()
    assert any(entry.name == "host" for entry in raised.traceback)
    assert value(counter) == 1
    assert coordinator.schedule(f, (0.5,)).fetch() == 0.5


def test_schedule_raises_what_an_earlier_function_did(coordinator, counter, failing):
    """CCO-24, CCO-25"""

    @coordinator.function
    def add():
        counter.assign_add(1)

    bad = coordinator.schedule(failing, (7,))
    until(lambda: bad.status is js.coordinator.RemoteValueStatus.ABORTED)
    with pytest.raises(IndexError):
        coordinator.schedule(add)
    coordinator.join()
    assert value(counter) == 0
    coordinator.schedule(add)
    coordinator.join()
    assert value(counter) == 1


# Workers that are lost.


def test_each_function_counts_once_although_workers_are_lost(made):
    """CCO-39, CCO-44: exactly once, where TensorFlow promises at least once."""
    strategy = js.ParameterServerStrategy(workers=2, backend="threads")
    with strategy.scope():
        total = js.Variable(jnp.zeros(3))
    with ClusterCoordinator(strategy) as coordinator:

        @coordinator.function
        def add(x):
            total.assign_add(jnp.full(3, x))
            return x

        values = []
        for i in range(60):
            values.append(coordinator.schedule(add, (float(i),)))
            if i in (15, 30, 45):
                strategy.backend.kill(i // 15 % 2)
        coordinator.join()
        assert coordinator.fetch(values) == list(range(60))
        starts = sum(state.starts for state in coordinator.workers)
        assert starts > 2
    np.testing.assert_array_equal(total.value(), np.full(3, sum(range(60))))
    strategy.close()


def test_a_worker_that_is_back_has_variables_of_its_own_anew():
    strategy = js.ParameterServerStrategy(workers=1, backend="threads")
    with strategy.scope():
        own = js.Variable(5.0, per_worker_variable=True)
    with ClusterCoordinator(strategy) as coordinator:

        @coordinator.function
        def add():
            own.assign_add(1.0)
            return own.value()

        assert [coordinator.schedule(add).fetch() for _ in range(2)] == [6.0, 7.0]
        assert own.read_all() == [7.0]
        strategy.backend.kill(0)
        assert coordinator.schedule(add).fetch() == 6.0
    strategy.close()


def test_a_chain_of_errors_names_the_users_code(coordinator):
    with pytest.raises(TypeError, match="decorate yours with `@coordinator.function`"):
        coordinator.schedule(lambda: 1)
    coordinator.join()
