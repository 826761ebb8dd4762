"""Loggers and stopwatches, with writers and clocks that are made for the test."""

import contextlib
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import slow

import jaxstrategy as js
from jaxstrategy import profiling
from jaxstrategy.profiling import MetricLogger, Profile, _links
from jaxstrategy.profiling._step_analysis import StepFacts


class Later(list):
    """A function of a step and its scalars that keeps them."""

    def __call__(self, step, scalars):
        self.append((step, scalars))


@pytest.fixture
def ready(monkeypatch):
    """Says which arrays are ready: those of `ready`, by identity; all if it is None."""
    arrays = []
    monkeypatch.setattr(
        "jaxstrategy.profiling._logger._is_ready",
        lambda array: any(array is known for known in arrays),
    )
    return arrays


# Writers.


def test_every_kind_of_writer_gets_all_scalars():
    class Clu:
        def __init__(self):
            self.got = []

        def write_scalars(self, step, scalars):
            self.got.append((step, scalars))

        def flush(self):
            self.got.append("flushed")

    class Board:
        def __init__(self):
            self.got = []

        def add_scalar(self, tag, scalar_value, global_step=None):
            self.got.append((tag, scalar_value, global_step))

        def flush(self):
            self.got.append("flushed")

        def close(self):
            raise AssertionError("a writer that was given is not closed")

    metrics = {"loss": jnp.float32(0.5), "eval": {"right": 3, "parts": (True, 2.0)}}
    names = ["eval/parts/0", "eval/parts/1", "eval/right", "loss"]
    values = [1.0, 2.0, 3.0, 0.5]
    clu, board, function = Clu(), Board(), Later()
    for writer in (clu, board, function):
        with MetricLogger(writer) as log:
            log(7, metrics)
    assert clu.got[0] == (7, dict(zip(names, values, strict=True)))
    assert board.got[:4] == [
        (name, value, 7) for name, value in zip(names, values, strict=True)
    ]
    assert function == clu.got[:1]
    assert "flushed" in clu.got and "flushed" in board.got
    assert all(type(value) is float for value in function[0][1].values())


def test_a_directory_is_one_of_tensorboard(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with MetricLogger(tmp_path / "run") as log:
        for step in range(3):
            log(step, {"loss": jnp.float32(step / 2)})
    (file,) = (tmp_path / "run").iterdir()
    found = []
    data, at = file.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        at += 12 + size + 4
        found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    assert found == [(0, "loss", 0.0), (1, "loss", 0.5), (2, "loss", 1.0)]


def test_a_directory_without_the_library_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(js.MissingExtraError, match=r"pip install 'jaxstrategy\[tens"):
        MetricLogger(tmp_path)


def test_only_process_0_writes(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    got = Later()
    with MetricLogger(got) as log, MetricLogger(tmp_path / "run") as other:
        log(0, {"loss": 1.0})
        other(0, {"loss": 1.0})
        log.flush()
    assert got == []
    assert not (tmp_path / "run").exists()


# When they are written.


def test_metrics_wait_until_they_are_ready_and_keep_their_order(ready):
    arrays, got = [jnp.float32(i) for i in range(4)], Later()
    log = MetricLogger(got)
    log(0, {"a": arrays[0]})
    log(1, {"a": arrays[1]})
    assert got == []
    ready.append(arrays[1])
    log(2, {"a": arrays[2]})
    assert got == []  # the first one is not ready
    ready.append(arrays[0])
    log(3, {"a": arrays[3]})
    assert got == [(0, {"a": 0.0}), (1, {"a": 1.0})]
    log.close()
    assert [step for step, _ in got] == [0, 1, 2, 3]
    log.close()
    assert len(got) == 4


def test_no_more_wait_than_may(ready):
    got = Later()
    log = MetricLogger(got, most_waiting=2)
    for step in range(5):
        log(step, {"a": jnp.float32(step)})
    assert [step for step, _ in got] == [0, 1, 2]


def test_after_an_error_only_what_is_ready_is_written(ready):
    first, second = jnp.float32(1), jnp.float32(2)
    got = Later()
    with pytest.raises(KeyError, match="of the loop"):
        with MetricLogger(got) as log:
            log(0, {"a": first})
            log(1, {"a": second})
            ready.append(first)
            raise KeyError("of the loop")
    assert got == [(0, {"a": 1.0})]


def test_some_steps_only():
    got = Later()
    with MetricLogger(got, every=3) as log:
        for step in range(1, 8):
            log(step, {"a": step})
        log(8, {"a": np.arange(8, 14), "b": 0.5})
    assert got == [
        (3, {"a": 3.0}), (6, {"a": 6.0}), (9, {"a": 9.0, "b": 0.5}),
        (12, {"a": 12.0, "b": 0.5}),
    ]  # fmt: skip


def test_metrics_of_several_steps_are_those_of_each():
    strategy, got = js.MirroredStrategy(jax.devices()[:4]), Later()

    @strategy.several
    def step(total, batch):
        mean = js.get_replica_context().all_reduce("mean", batch)
        return total + mean, {"mean": mean, "total": total}

    batches = [strategy.per_replica([1.0 * i] * 3 + [i + 4.0]) for i in range(5)]
    total, number = strategy.mirror(0.0), 0
    with MetricLogger(got) as log:
        for group in (batches[:3], batches[3:]):
            total, metrics = step(total, tuple(group))
            log(number, metrics)
            number += len(group)
    assert got == [
        (i, {"mean": i + 1.0, "total": float(sum(range(i + 1)))}) for i in range(5)
    ]


# Errors.


def donated():
    array = jnp.float32(1)
    array.delete()
    return array


@pytest.mark.parametrize(
    "metrics, error, words",
    [({"a": np.ones((2, 2))}, ValueError, r"`a` has shape (2, 2); a scalar was wanted"),
     ({"a": np.ones(2), "b": np.ones(3)}, ValueError, "`a` of 2 and `b` of 3 steps"),
     ({"a": "text"}, TypeError, "`a` is 'text'; a number or an array was wanted"),
     ({"a": jnp.complex64(1)}, TypeError, "a number or an array was wanted"),
     ({"a": js.PerReplica(np.ones(2))}, TypeError, "`a` is a PerReplica, with a value"),
     ({"a": donated}, js.DonatedValueError, "`a`, logged for step 4, was given to a")],
)  # fmt: skip
def test_metrics_that_cannot_be_logged(metrics, error, words):
    metrics = {name: v() if callable(v) else v for name, v in metrics.items()}
    with pytest.raises(error, match=re.escape(words)):
        MetricLogger(Later())(4, metrics)


@pytest.mark.parametrize(
    "make, error, words",
    [(lambda: MetricLogger(3), TypeError, "`writer` was 3; a directory, a `RunWr"),
     (lambda: MetricLogger(print, every=0), ValueError, "`every` was 0; at least 1"),
     (lambda: MetricLogger(print, every=0.5), TypeError, "`every` was 0.5; a whole"),
     (lambda: MetricLogger(print, most_waiting=0), ValueError, "`most_waiting` was 0")],
)  # fmt: skip
def test_bad_loggers(make, error, words):
    with pytest.raises(error, match=words):
        make()


# The stopwatch.


class Machine:
    """A clock, and a device that works on one step after the other."""

    def __init__(self, compiling=10.0, dispatch=1.0, device=4.0):
        self.now = 100.0
        self.free = 0.0
        self.compiling, self.dispatch, self.device = compiling, dispatch, device
        self.waits = 0

    def clock(self):
        return self.now

    def step(self, *batches):
        self.now += self.compiling + self.dispatch
        self.compiling = 0.0
        self.free = max(self.free, self.now) + self.device
        return Result(self, self.free)


class Result:
    nbytes = 4

    def __init__(self, machine, done, deleted=False):
        self._machine, self._done, self._deleted = machine, done, deleted

    def is_deleted(self):
        return self._deleted

    def block_until_ready(self):
        self._machine.waits += 1
        self._machine.now = max(self._machine.now, self._done)
        return self


class Analysis:
    """Knows what it is told of a call, and keeps what was called."""

    def __init__(self, seconds=0.0, **facts):
        self.facts, self.seconds, self.calls = StepFacts(**facts), seconds, []

    @contextlib.contextmanager
    def during(self, step, args, kwargs):
        self.calls.append((args, kwargs))
        yield


def profile(machine, analysis=None, step=None, **options):
    analysis = analysis or Analysis()
    return Profile(step or machine.step, analysis, clock=machine.clock, **options)


def test_times_of_a_loop_that_waits_for_the_devices():
    machine = Machine()
    with profile(machine, examples=32, every=10) as train:
        for _ in range(21):
            train()
            machine.now += 0.5
    report = train.report()
    assert (report.name, report.calls, report.steps) == ("step", 21, 21)
    assert report.first_call == 15.0  # compiling, starting and the device
    assert (report.dispatch, report.between) == (1.0, 0.5)
    assert report.alone == 5.0  # starting it included
    # Each time nine steps, one after the other on the device, after the first was
    # started: 0.5 between, 1 to start it.
    assert report.step == pytest.approx((1.5 + 9 * 4.0) / 9)
    # They make one step after the other, so they are not busy for longer than that.
    assert report.device == report.step < report.alone
    assert report.examples_per_second == pytest.approx(32 / report.step)
    assert report.communication is report.communication_share is None


def test_times_of_a_loop_that_waits_for_the_host():
    machine = Machine(dispatch=3.0, device=1.0)
    with profile(machine, every=10) as train:
        for _ in range(12):
            train()
            machine.now += 2.0
    report = train.report()
    assert (report.dispatch, report.between, report.device) == (3.0, 2.0, 4.0)
    assert (report.alone, report.input) == (4.0, 0.0)
    assert report.step == pytest.approx((9 * 5.0 + 2.0) / 9)  # the gap after them, too
    assert report.examples_per_second is None


def test_the_loop_waits_now_and_then_only():
    machine = Machine()
    with profile(machine, every=50) as train:
        for _ in range(101):
            train()
        waited = machine.waits
    # After the first call; before and after the second one, and the 52nd.
    assert waited == 5


def test_several_steps_in_a_call_are_counted():
    strategy = js.MirroredStrategy(jax.devices()[:2])
    many = strategy.several(lambda total, batch: total + batch)
    machine, analysis = Machine(dispatch=2.0, device=6.0), Analysis(communication=3.0)

    def step(total, batches):
        return machine.step()

    step.makes_several = many.makes_several

    with profile(machine, analysis, step=step) as train:
        for size in (2, 2, 4):
            train(0, [0.0] * size)
    report = train.report()
    assert (report.calls, report.steps) == (3, 8)
    assert report.alone == 8.0 / 2
    assert report.dispatch == (2.0 / 2 + 2.0 / 4) / 2
    assert report.communication == 1.5
    assert report.communication_share == 1.5 / report.device
    assert analysis.calls == [((0, [0.0, 0.0]), {})]


def test_a_result_that_was_given_away_is_not_waited_for():
    machine = Machine()

    def step():
        machine.step()
        return Result(machine, machine.free, deleted=True)

    with profile(machine, step=step, every=2) as train:
        for _ in range(5):
            train()
    report = train.report()
    assert machine.waits == 0
    assert (report.first_call, report.device, report.step) == (None, None, None)
    assert report.dispatch == 1.0


def test_times_are_logged_after_each_wait():
    machine, got = Machine(), Later()
    with profile(machine, every=4, log=MetricLogger(got)) as train:
        for _ in range(9):
            train()
    assert [step for step, _ in got] == [2, 6, 9]
    assert got[0][1] == {
        "profile/dispatch": 1.0, "profile/between": 0.0, "profile/input": 0.0,
        "profile/alone": 5.0, "profile/device": 5.0,
    }  # fmt: skip
    assert got[1][1]["profile/step"] == pytest.approx((1 + 3 * 4) / 3)


def test_times_are_logged_whatever_steps_the_logger_leaves_out():
    machine, got = Machine(), Later()
    with profile(machine, every=4, log=MetricLogger(got, every=100)) as train:
        for _ in range(9):
            train()
    assert [step for step, _ in got] == [2, 6, 9]


def test_a_few_calls_are_traced_and_not_timed(monkeypatch):
    machine, events = Machine(), []

    def start_trace(directory):
        machine.now += 1000.0
        events.append(("start", directory, machine.steps))

    def stop_trace():
        events.append(("stop", machine.now >= machine.free, machine.steps))

    machine.steps = 0

    def step():
        machine.steps += 1
        return machine.step()

    monkeypatch.setattr(jax.profiler, "start_trace", start_trace)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop_trace)
    with profile(machine, step=step, every=4, trace_dir="there") as train:
        for _ in range(9):
            train()
    # Calls 2, 3 and 4 of 0, 1, ...; all of it done when the trace ends.
    assert events == [("start", "there", 2), ("stop", True, 5)]
    report = train.report()
    assert (report.dispatch, report.between, report.alone) == (1.0, 0.0, 5.0)
    assert report.step < 6


def test_a_trace_ends_with_the_loop_and_is_of_process_0(monkeypatch):
    events = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda d: events.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    machine = Machine()
    with pytest.raises(KeyError):
        with profile(machine, trace_dir="there") as train:
            for _ in range(3):
                train()
            raise KeyError
    assert events == ["start", "stop"]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with profile(machine, trace_dir="there") as train:
        for _ in range(9):
            train()
    assert events == ["start", "stop"]


# With a strategy.


@pytest.fixture
def two():
    return js.MirroredStrategy(jax.devices()[:2])


def mean(batch):
    return js.get_replica_context().all_reduce("mean", js.masked_mean(batch))


def rows(strategy, number, size=8):
    options = js.InputOptions(experimental_per_replica_buffer_size=0)
    source = [np.ones(size, np.float32)] * number
    return strategy.experimental_distribute_dataset(source, options)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_step_gives_what_it_gives_without(n):
    strategy = js.MirroredStrategy(jax.devices()[:n])
    topology = js.Topology(bandwidth=4.0, latency=1.0, replicas=n)
    with strategy.profile(strategy.run(mean), every=2, topology=topology) as step:
        found = [float(step(batch)) for batch in rows(strategy, 6)]
    assert found == [1.0] * 6
    report = step.report()
    assert (report.name, report.calls, report.steps) == ("mean", 6, 6)
    assert report.communication == topology.fastest("all_reduce", 4)
    for value in (report.first_call, report.dispatch, report.device, report.step):
        assert value is not None and value > 0
    assert report.examples_per_second == pytest.approx(8 / report.step)


@pytest.mark.parametrize("n", [2, *slow(1)])
@pytest.mark.parametrize("given", ["state first", "grouped", "pipelines", "filled up"])
def test_the_examples_are_those_of_the_batch_of_a_dataset(n, given):
    strategy = js.MirroredStrategy(jax.devices()[:n])
    data, wanted = rows(strategy, 6), 8
    step, state = strategy.run(lambda state, batch: mean(batch)), (np.zeros(5),)
    match given:
        case "grouped":
            data, step, state = rows(strategy, 12), strategy.several(mean), ()
            data = js.grouped(data, 2)
        case "pipelines":
            data = strategy.distribute_datasets_from_function(
                lambda context: [np.ones(4, np.float32)] * 12
            )
            wanted = 4 * n
        case "filled up":
            data, wanted = rows(strategy, 6, 7), 7
    timed = strategy.profile(step, every=2)
    for batch in data:
        timed(*state, batch)
    report = timed.report()
    assert report.examples_per_second == pytest.approx(wanted / report.step)


@pytest.mark.parametrize("shuffle", [None, 0])
def test_the_examples_without_a_strategy_are_those_of_batches(shuffle):
    data = js.batches((np.ones((48, 2)), np.ones(48)), 8, shuffle=shuffle)
    timed = js.get_strategy().profile(lambda w, batch: jnp.mean(w * batch[1]), every=2)
    for batch in data:
        timed(np.ones(5)[0], batch)
    report = timed.report()
    assert report.examples_per_second == pytest.approx(8 / report.step)


def test_several_steps_a_bound_one_and_any_other_function(two):
    many = two.several(mean)
    topology = js.Topology(bandwidth=4.0, latency=1.0, replicas=2)
    with two.profile(many, topology=topology) as timed:
        for batches in js.grouped(rows(two, 6), 2):
            np.testing.assert_array_equal(timed(batches), [1.0, 1.0])
    report = timed.report()
    assert (report.calls, report.steps) == (3, 6)
    assert report.communication == pytest.approx(topology.fastest("all_reduce", 4))

    with two.profile(jax.jit(jnp.sin)) as timed:
        assert timed(0.0) == 0.0
    assert timed.report().communication == 0.0  # it runs on one device

    def plain(x):
        return x + 1

    with two.profile(plain) as timed:
        assert timed(0.0) == 1.0
    assert timed.report().communication is None


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_step_that_is_compiled_ahead(two, is_inside):
    (batch,) = rows(two, 1)
    ahead = two.compile(mean, (batch,))
    compilations, is_open = [], [True]

    def compiled(event, seconds, **told):
        if is_open and event == "/jax/core/compile/backend_compile_duration":
            compilations.append(told.get("fun_name"))

    topology = js.Topology(bandwidth=4.0, latency=1.0, replicas=2)
    step = (lambda batch: ahead(batch)) if is_inside else ahead
    jax.monitoring.register_event_duration_secs_listener(compiled)
    with two.profile(step, topology=topology) as timed:
        result = timed(batch)
    is_open.clear()
    assert result == 1.0
    report = timed.report()
    assert report.communication == pytest.approx(topology.fastest("all_reduce", 4))
    memory = ahead.compiled.memory_analysis()
    assert report.memory.arguments == memory.argument_size_in_bytes
    assert report.flops == 2 * ahead.compiled.cost_analysis()["flops"]
    assert compilations == []
    assert ("first call, with compiling" in str(report)) is is_inside
    assert "  first call  " in str(report) or is_inside

    with two.profile(ahead, topology=topology, compiled=False) as timed:
        timed(batch)
    assert timed.report().memory is timed.report().flops is None


def test_a_step_without_communication(two):
    with two.profile(two.run(lambda x: x + 1)) as step:
        step(np.float32(1))
    assert step.report().communication == 0.0


def measured(seconds_of, late=(0.0,) * 7):
    """Links of four replicas, where all-reduces take these seconds and more."""
    replicas = js.MirroredStrategy(jax.devices()[:4])._replicas
    turns = [
        n * (seconds_of(size) + more) for more in late for size, n in _links._SIZES
    ]
    times = iter([at for turn in turns for at in (7.0, 7.0 + turn)])
    return _links.measured(replicas, clock=lambda: next(times))


def test_links_are_measured_as_those_of_a_ring():
    late = (0.1, -0.01, 0.0, 0.2, -0.02, -0.3, 3)
    links = measured(lambda size: 0.03 + size / 1e9, late)
    # In the middle of seven: 0.03 s, and a second more for each gigabyte.
    assert links.replicas == 4
    line = js.Topology(links.bandwidth, links.latency, 4)
    for size in (2**12, 2**18, 2**23, 2**24, 2**30):
        assert links.ring("all_reduce", size) == pytest.approx(0.03 + size / 1e9)
        assert line.ring("all_reduce", size) == pytest.approx(0.03 + size / 1e9)


def test_links_know_how_much_a_size_varies():
    late = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 30.0)
    links = measured(lambda size: 1 + size / 2**12, late)
    assert links.bounds("all_reduce", 2**12) == pytest.approx((2.1, 2.5))
    # Between sizes no more is known than what the next ones take.
    assert links.bounds("all_reduce", 2**14) == pytest.approx((2.1, 9.5))
    assert links.bounds("all_reduce", 2**18) == pytest.approx((33.1, 129.5))


def test_links_have_the_times_of_all_measured_sizes():
    """Which no line has: caches hold 2 MiB, and not 8."""
    taking = {2**12: 2, 2**15: 3, 2**17: 4, 2**19: 6, 2**21: 20, 2**23: 98}
    links = measured(lambda size: taking[size])
    for size, seconds in taking.items():
        assert links.ring("all_reduce", size) == pytest.approx(seconds)
    assert links.ring("all_reduce", 5 * 2**20) == pytest.approx((20 + 98) / 2)
    assert links.ring("all_reduce", 2**24) == pytest.approx(98 + 8 * 13)
    assert links.ring("all_reduce", 4) == pytest.approx(2)


def test_more_bytes_do_not_take_less_on_measured_links():
    taking = {2**12: 5, 2**15: 2, 2**17: 4, 2**19: 6, 2**21: 20, 2**23: 18}
    links = measured(lambda size: taking[size])
    found = [links.ring("all_reduce", size) for size in taking]
    # What has descended has the mean of its neighbours.
    assert found == pytest.approx([3.5, 3.5, 4, 6, 19, 19])


@pytest.mark.parametrize(
    ("seconds", "fixed", "per_byte"),
    [
        ([1.0, 1.0, 1.0], 1.0, 0.0),  # no size takes longer
        ([1e-3, 1e-1, 1e1], 0.0, 1e-3),  # nothing is fixed
        ([2.0, 1.5, 1.0], 1.2787, 0.0),  # what is larger takes less: about the mean
        ([1e-3, 2e-1, 4e1], 0.0, 4 / 3e3),  # and more than in proportion
    ],
)
def test_neither_latency_nor_bandwidth_of_links_is_negative(seconds, fixed, per_byte):
    sizes = [1, 100, 10_000] if per_byte else [1, 2, 3]
    found = _links.fitted(sizes, seconds)
    assert found[0] == pytest.approx(fixed, rel=1e-3, abs=1e-9)
    assert found[1] == pytest.approx(per_byte, rel=1e-3, abs=1e-6) and found[1] > 0


def test_links_between_sizes_are_within_a_quarter_of_gloos():
    # Microseconds of all-reduces by gloo between processes of a host of two cores.
    sizes = [2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24]
    of_two = [168, 162, 226, 496, 1659, 4580, 18801]
    of_eight = [3558, 3535, 3289, 4198, 6689, 18732, 89567]
    for times in (of_two, of_eight):
        # Sizes that are measured now, and were not then, get what lies between.
        links = measured(functools.partial(np.interp, xp=sizes, fp=times))
        for size, time in zip(sizes, times, strict=True):
            assert links.ring("all_reduce", size) == pytest.approx(time, rel=0.25)


def test_a_measured_share_is_one(two):
    with two.profile(two.run(mean)) as step:
        for batch in rows(two, 3):
            step(batch)
    report = step.report()
    assert report.communication is not None and report.communication > 0
    assert 0 < report.communication_share <= 1


def test_a_trace_is_written(two, tmp_path):
    with two.profile(two.run(mean), trace_dir=tmp_path) as step:
        for batch in rows(two, 6):
            step(batch)
    assert list(tmp_path.rglob("*.xplane.pb"))


# Reports.


def test_a_report_is_a_table():
    report = profiling.Report(
        "step", 10, 20, first_call=2.5, dispatch=0.0012, between=1e-5, device=0.01,
        step=0.008, examples_per_second=64_000.0, communication=0.0025, input=9e-6,
        alone=0.011,
    )  # fmt: skip
    assert (
        str(report)
        == """\
`step`
  steps                       20, in 10 calls
  first call, with compiling  2.5 s
  host, to start a step       1.2 ms
  host, between two calls     10 us
    waiting for a batch       9 us
  one step by itself          11 ms
  devices, at most            10 ms
  a step in the loop          8 ms
  examples per second         64 k
  communication               25% of the devices' time (predicted)
Limited by the devices: the devices are busy for 100% of the time or more (8 ms
  of 8 ms in each step). The loop keeps them fed; a faster step is what is left."""
    )
    assert repr(report) == str(report)
    html = report._repr_html_()
    assert re.search(r"host, to start a step</td><td[^>]*>1.2 ms</td>", html)
    assert "Limited by the devices" in html
    assert "<svg" in html and "<script" not in html


def test_what_is_not_known_is_said():
    report = profiling.Report("step", 0, 0)
    assert str(report).count("not known") == 9
    assert report.scalars() == {}
    assert report.communication_share is None


def test_the_share_is_at_most_one():
    report = profiling.Report("step", 1, 1, device=1.0, communication=5.0)
    assert report.communication_share == 1.0


@pytest.mark.parametrize(
    "step, every, error, words",
    [(3, 50, TypeError, "`profile` was given 3, which cannot be called"),
     (mean, 1, ValueError, "`every` was 1; the loop can wait for the devices every 2"),
     (mean, 2.5, TypeError, "`every` was 2.5; a number of calls was wanted")],
)  # fmt: skip
def test_bad_profiles(two, step, every, error, words):
    with pytest.raises(error, match=words):
        two.profile(step, every=every)


def test_it_says_what_it_is(two):
    timed = two.profile(two.run(mean))
    assert repr(timed) == "<mean with a stopwatch, 0 calls>"
