"""Loggers and stopwatches, with writers and clocks that are made for the test."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy import profiling
from jaxstrategy._src.profiling import links as _links
from jaxstrategy._src.profiling.profile import StepAnalysis, StepFacts
from jaxstrategy._src.tracing.explanation.explanation import Memory
from jaxstrategy.profiling import Comparison, MetricLogger, Profile, compare


class Later(list):
    """A function of a step and its scalars that keeps them."""

    def __call__(self, step, scalars):
        self.append((step, scalars))


@pytest.fixture
def ready(monkeypatch):
    """Says which arrays are ready: those of `ready`, by identity; all if it is None."""
    arrays = []
    monkeypatch.setattr(
        "jaxstrategy._src.profiling.metric_logger._is_ready",
        lambda array: any(array is known for known in arrays),
    )
    return arrays


def test_writers_get_all_scalars():
    class Clu:
        def __init__(self):
            self.got = []

        def write_scalars(self, step, scalars):
            self.got.append((step, scalars))

        def flush(self):
            self.got.append("flushed")

    metrics = {"loss": jnp.float32(0.5), "eval": {"right": 3, "parts": (True, 2.0)}}
    clu, function = Clu(), Later()
    for writer in (clu, function):
        with MetricLogger(writer) as log:
            log(7, metrics)
    found = {"eval/parts/0": 1.0, "eval/parts/1": 2.0, "eval/right": 3.0, "loss": 0.5}
    assert clu.got == [(7, found), "flushed"] and function == [(7, found)]
    assert all(type(value) is float for value in function[0][1].values())


def test_only_process_0_writes(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    got = Later()
    with MetricLogger(got) as log:
        log(0, {"loss": 1.0})
        log.flush()
    assert got == []


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
    log.flush()
    assert [step for step, _ in got] == [0, 1, 2, 3]
    log.flush()
    assert len(got) == 4


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


def donated():
    array = jnp.float32(1)
    array.delete()
    return array


def test_what_cannot_be_logged_or_written():
    for metrics, error, words in (
        ({"a": np.ones((2, 2))}, ValueError, "`a` has shape (2, 2); a scalar was wan"),
        ({"a": np.ones(2), "b": np.ones(3)}, ValueError, "`a` of 2 and `b` of 3 steps"),
        ({"a/b": 1, "a": {"b": 2}}, ValueError, "Two metrics are called `a/b`"),
        ({"a": "text"}, TypeError, "`a` is 'text'; a number or an array was wanted"),
        ({"a": jnp.complex64(1)}, TypeError, "a number or an array was wanted"),
        ({"a": js.PerReplica(np.ones(2))}, TypeError, "`a` is a PerReplica, with a"),
        ({"a": donated()}, js.errors.DonatedValueError, "`a`, logged for step 4, was"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            MetricLogger(Later())(4, metrics)
    for writer, options, error, words in (
        (3, {}, TypeError, r"`writer` was 3; an object with `write_scalars\(step, sca"),
        (Later, {}, TypeError, "a function of a step and a dict of scalars was wanted"),
        (print, {"every": 0}, ValueError, "`every` was 0; 1 or more"),
        (print, {"every": 0.5}, TypeError, "`every` was 0.5; a whole"),
        (print, {"most_waiting": 0}, ValueError, "`most_waiting` was 0"),
    ):
        with pytest.raises(error, match=words):
            MetricLogger(writer, **options)


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
        analysis = StepAnalysis(None, None)
        analysis._found.append(StepFacts(**facts))
        self.facts, self.seconds, self.calls = analysis.facts, seconds, []

    @contextlib.contextmanager
    def during(self, step, args, kwargs):
        self.calls.append((args, kwargs))
        yield


def profile(machine, analysis=None, step=None, **options):
    analysis = analysis or Analysis()
    return Profile(step or machine.step, analysis, clock=machine.clock, **options)


def test_times_of_loops_that_wait_for_the_devices_or_the_host():
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


def timed(machine, analysis=None, python=0.0, reading=0.0, **options):
    """The report of a loop with batches that take `reading`, and Python in its body."""

    def batches():
        for number in range(21):
            machine.now += reading
            yield number

    with profile(machine, analysis, every=10, **options) as train:
        for _ in train.batches(batches()):
            train()
            machine.now += python
    return train.report()


@pytest.mark.parametrize("around", [lambda train, data: data, Profile.batches])
def test_a_dataset_tells_how_long_the_loop_waits(around):
    strategy = js.MirroredStrategy(jax.devices()[:2])
    machine = Machine(dispatch=0.5, device=1.0)

    def slow(context):
        for _ in range(12):
            machine.now += 3.0
            yield np.ones(4, np.float32)

    # Nothing is read ahead: each batch is read when the loop asks for it.
    options = js.InputOptions(experimental_per_replica_buffer_size=0)
    dataset = strategy.distribute_datasets_from_function(slow, options)
    with profile(machine, every=3) as train:
        for batch in around(train, dataset):
            train(batch)
    report = train.report()
    assert report.calls == 6
    assert report.input == pytest.approx(6.0)  # a batch for each replica


def test_figures_are_rates_of_the_loop():
    analysis = Analysis(flops=8e9, memory=Memory(100, 20, 10, 50, 0))
    report = timed(Machine(dispatch=0.5, device=4.0), analysis, examples=32, tokens=640,
                   peak_flops=4e9)  # fmt: skip
    assert report.step == pytest.approx(4.05, abs=0.1)
    assert report.examples_per_second == pytest.approx(32 / report.step)
    assert report.tokens_per_second == pytest.approx(640 / report.step)
    assert report.flops_per_second == pytest.approx(8e9 / report.step)
    assert report.mfu == pytest.approx(8e9 / report.step / 4e9)
    assert report.scalars()["mfu"] == report.mfu
    assert re.search(r"model FLOPs utilization +49% of 4 GFLOP/s", str(report))
    assert re.search(r"memory of a device, planned +160 B", str(report))


def test_the_device_that_used_most_memory_counts():
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    devices = [
        Device({"peak_bytes_in_use": 1024, "bytes_in_use": 1}),
        Device({"peak_bytes_in_use": 4096, "bytes_in_use": 2}),
        Device(None),
    ]
    report = timed(Machine(), devices=devices)
    assert report.peak_memory == 4096
    assert re.search(r"memory of a device, in use +4 KiB", str(report))
    assert timed(Machine(), devices=[Device(None)]).peak_memory is None


def mean(batch):
    return js.get_replica_context().all_reduce("mean", js.masked_mean(batch))


def rows(strategy, number, size=8):
    options = js.InputOptions(experimental_per_replica_buffer_size=0)
    source = [np.ones(size, np.float32)] * number
    return strategy.experimental_distribute_dataset(source, options)


def test_a_step_gives_what_it_gives_without(n=4):
    strategy = js.MirroredStrategy(jax.devices()[:n])
    topology = js.profiling.Topology(bandwidth=4.0, latency=1.0, replicas=n)
    with strategy.profile(strategy.run(mean), every=2, topology=topology) as step:
        found = [float(step(batch)) for batch in rows(strategy, 6)]
    assert found == [1.0] * 6
    report = step.report()
    assert (report.name, report.calls, report.steps) == ("mean", 6, 6)
    assert report.communication == topology.fastest("all_reduce", 4)
    for value in (report.first_call, report.dispatch, report.device, report.step):
        assert value is not None and value > 0
    assert report.examples_per_second == pytest.approx(8 / report.step)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_step_that_is_compiled_ahead(two, is_inside):
    (batch,) = rows(two, 1)
    ahead = two.compile(mean, (batch,))
    compilations, is_open = [], [True]

    def compiled(event, seconds, **told):
        if is_open and event == "/jax/core/compile/backend_compile_duration":
            compilations.append(told.get("fun_name"))

    topology = js.profiling.Topology(bandwidth=4.0, latency=1.0, replicas=2)
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


def measured(seconds_of, late=(0.0,) * 7):
    """Links of four replicas, where all-reduces take these seconds and more."""
    replicas = js.MirroredStrategy(jax.devices()[:4])._replicas
    turns = [
        n * (seconds_of(size) + more) for more in late for size, n in _links._SIZES
    ]
    times = iter([at for turn in turns for at in (7.0, 7.0 + turn)])
    return _links.measured(replicas, clock=lambda: next(times))


@pytest.mark.slow
def test_links_are_measured_as_those_of_a_ring():
    late = (0.1, -0.01, 0.0, 0.2, -0.02, -0.3, 3)
    links = measured(lambda size: 0.03 + size / 1e9, late)
    # In the middle of seven: 0.03 s, and a second more for each gigabyte.
    assert links.replicas == 4
    line = js.profiling.Topology(links.bandwidth, links.latency, 4)
    for size in (2**12, 2**18, 2**23, 2**24, 2**30):
        assert links.ring("all_reduce", size) == pytest.approx(0.03 + size / 1e9)
        assert line.ring("all_reduce", size) == pytest.approx(0.03 + size / 1e9)


@pytest.mark.slow
def test_a_trace_is_written(two, tmp_path):
    with two.profile(two.run(mean), trace_dir=tmp_path) as step:
        for batch in rows(two, 6):
            step(batch)
    assert list(tmp_path.rglob("*.xplane.pb"))


ROWS, IN, OUT = 64, 32, 128


def matrices(strategy):
    n = strategy.num_replicas_in_sync
    w = strategy.mirror(np.ones((IN, OUT), np.float32))
    return w, strategy.per_replica(np.ones((n, ROWS // n, IN), np.float32))


def product(w, x):
    return js.get_replica_context().all_reduce("mean", (x @ w).sum())


# A product has a multiplication and an addition for each pair; the sum and the mean
# add little.
BY_HAND = 2 * ROWS * IN * OUT


def in_run(strategy):
    return lambda w, x: strategy.run(product, (w, x))


@pytest.mark.slow
def test_operations_of_all_replicas_are_those_counted_by_hand():
    n = 4
    strategy = js.MirroredStrategy(jax.devices()[:n])
    topology = js.profiling.Topology(bandwidth=4.0, latency=1.0, replicas=n)
    with strategy.profile(in_run(strategy), topology=topology, peak_flops=1e9) as step:
        assert float(step(*matrices(strategy))) == ROWS // n * IN * OUT
    report = step.report()
    assert report.flops == pytest.approx(BY_HAND, rel=0.05)
    assert not report.flops_are_least
    assert report.peak_flops == n * 1e9
    assert report.memory.peak > 4 * IN * OUT
    assert report.communication == topology.fastest("all_reduce", 4)


@pytest.mark.slow
def test_a_loop_in_a_step_counts_once_and_is_said_to():
    strategy = js.MirroredStrategy(jax.devices()[:2])

    def looped(w, x):
        def turn(x, _):
            return jnp.tanh(x @ w), None

        return js.get_replica_context().all_reduce(
            "mean", jax.lax.scan(turn, x, length=50)[0].sum()
        )

    w = strategy.mirror(np.ones((IN, IN), np.float32))
    with strategy.profile(strategy.run(looped)) as step:
        step(w, matrices(strategy)[1])
    report = step.report()
    assert report.flops_are_least
    assert report.flops < 50 * 2 * ROWS * IN * IN / 10


def test_a_report_is_a_table_which_says_what_is_not_known():
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
  communication               25% of the devices' time (predicted)"""
    )
    assert repr(report) == str(report)
    html = report._repr_html_()
    assert re.search(r"host, to start a step</td><td[^>]*>1.2 ms</td>", html)
    report = profiling.Report("step", 0, 0)
    assert str(report).count("not known") == 9
    assert report.scalars() == {}
    assert report.communication_share is None


def test_bad_profiles(two):
    for step, options, error, words in (
        (3, {}, TypeError, "`profile` was given 3, which cannot be called"),
        (mean, {"every": 1}, ValueError, "`every` was 1; the loop can wait for the"),
        (mean, {"every": 2.5}, TypeError, "`every` was 2.5; a number of calls was"),
        *(
            (mean, {name: 0}, ValueError, f"`{name}` was 0; a positive number was")
            for name in ("examples", "tokens", "flops", "peak_flops")
        ),
    ):
        with pytest.raises(error, match=words):
            two.profile(step, **options)


@pytest.fixture
def one():
    return js.OneDeviceStrategy("CPU:0")


class Steps:
    """Makes steps that take as long as a table says, by replicas and examples."""

    def __init__(self, seconds):
        self.seconds, self.now, self.made, self.called = seconds, 0.0, [], []

    def clock(self):
        return self.now

    def make(self, strategy, examples):
        key = strategy.num_replicas_in_sync, examples
        self.made.append(key)
        times = iter(self.seconds[key])

        def step():
            self.called.append(key)
            self.now += next(times)
            return np.ones(2)

        return step


def test_replicas_and_one_are_compared(one, four):
    steps = Steps({
        (1, 64): [100.0, 8.0, 9.0, 20.0],  # the first call compiles
        (1, 16): [100.0, 3.0, 3.0, 2.0],
        (4, 64): [100.0, 4.0, 1.0, 4.0],
    })  # fmt: skip
    found = compare(steps.make, one, four, examples=64, repeats=3, clock=steps.clock)
    assert (found.replicas, found.examples) == (4, 64)
    assert (found.whole, found.part, found.all) == (9.0, 3.0, 4.0)
    # In turn, so that what else the machine does meets all of them.
    assert steps.called == [(1, 64), (1, 16), (4, 64)] * 4
    for whole, part, all_, lost, said in (
        (8.0, 2.0, 2.1, (0.0, 0.1), "3.81 times as fast, 95% of what 4 could be"),
        (8.0, 6.0, 6.5, (4.0, 0.5), "a quarter of 8 s would be 2 s"),
        (8.0, 2.5, 6.5, (0.5, 4.0), "4 replicas take longer than one with its 16"),
        (8.0, 3.0, 2.5, (1.0, 0.0), "small batch: 1 s: 16 examples take one"),
    ):
        found = Comparison(4, 64, whole, part, all_)
        assert found.speedup == whole / all_ and found.efficiency == whole / all_ / 4
        assert (found.small_batch, found.communication) == pytest.approx(lost)
        assert said in " ".join(str(found).split())
    for change, error, words in (
        ({"examples": 6}, ValueError, "`examples` was 6, which 4 replicas cannot"),
        ({"examples": 0}, ValueError, "`examples` was 0, which 4 replicas cannot"),
        ({"repeats": 0}, ValueError, "`repeats` was 0; 1 or more was wanted"),
        ({"repeats": 1.5}, TypeError, "`repeats` was 1.5; a whole number was wanted"),
        ({"many": 4}, TypeError, "`strategy` was 4; a strategy was wanted"),
        ({"make": lambda s, n: 3}, TypeError, "`make` returned 3; a function that"),
        ({"one": four}, ValueError, "`one` has 4 replicas; a strategy of one was"),
    ):
        given = {"make": lambda s, n: lambda: None, "one": one, "many": four}
        with pytest.raises(error, match=re.escape(words)):
            compare(**given | {"examples": 8} | change)
