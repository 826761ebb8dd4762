"""A profile says what limits a loop, and counts operations as one does by hand."""

import concurrent.futures
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import looped
from test_profiling import Analysis, Machine, profile

import jaxstrategy as js
from jaxstrategy.inputs import _batch_waits
from jaxstrategy.profiling import Profile
from jaxstrategy.profiling._peaks import peak_flops
from jaxstrategy.tracing.explanation._facts import Memory


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


@looped(
    "machine, analysis, loop, name, evidence",
    [
        (Machine(dispatch=0.5, device=4.0), None, {}, "devices", "busy for"),
        (
            Machine(dispatch=0.5, device=4.0), Analysis(communication=2.4), {},
            "communication", "and collectives take 59% of that",
        ),
        (
            Machine(dispatch=0.5, device=1.0), None, {"python": 3.0},
            "host", "Python is busy for 3 s between two calls",
        ),
        (
            Machine(dispatch=0.5, device=1.0), None, {"reading": 3.0, "python": 1.0},
            "input", "the loop waits 3 s for a batch, and the devices are busy for 2",
        ),
        (
            Machine(dispatch=3.0, device=1.0), None, {"python": 1.0},
            "small batch", "the host needs 3 s to start a step, and the devices are",
        ),
    ],
)  # fmt: skip
def test_what_limits_a_loop(machine, analysis, loop, name, evidence):
    report = timed(machine, analysis, **loop)
    assert report.limit.name == name
    assert evidence in report.limit.evidence
    assert re.search(rf"\nLimited by (the |a )?{name}: ", str(report))
    assert report.limit.evidence in " ".join(str(report).split())
    assert name in report._repr_html_()


def test_a_call_that_waits_for_the_devices_is_not_the_hosts_time():
    """As JAX does when too many steps are under way."""
    machine = Machine(dispatch=0.5, device=4.0)

    def step():
        result = machine.step()
        machine.now = max(machine.now, machine.free - 8.0)
        return result

    with profile(machine, step=step, every=10) as train:
        for _ in range(21):
            train()
    report = train.report()
    assert report.dispatch == 0.5
    assert report.limit.name == "devices"


def test_what_was_not_measured_is_not_blamed_on_anything():
    machine = Machine(dispatch=0.5, device=1.0)
    calls = iter(range(100))

    def step():
        # All but those on idle devices take long, for a reason that nobody knows.
        if next(calls) % 10 != 1:
            machine.now += 20.0
        return machine.step()

    with profile(machine, step=step, every=10) as train:
        for _ in range(21):
            train()
    limit = train.report().limit
    assert limit.name == "unknown"
    assert "the host for 500 ms; what the rest of the time went into" in limit.evidence
    assert "Limited by something unknown: the devices" in str(train.report())


# Datasets.


@looped("around", [lambda train, data: data, Profile.batches])
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
    assert report.limit.name == "input"


def test_batches_that_another_thread_waits_for_do_not_count():
    machine = Machine(dispatch=0.5, device=1.0)

    def read():
        with _batch_waits.waiting():
            machine.now += 100.0

    with profile(machine, every=3) as train:
        for _ in range(10):
            train()
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(read).result()
            with _batch_waits.waiting():
                machine.now += 2.0
    assert train.report().input == pytest.approx(2.0)


# Figures.


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


def test_operations_that_are_given_count_instead():
    analysis = Analysis(flops=8e9, is_least=True)
    report = timed(Machine(), analysis, peak_flops=4e9)
    assert report.flops_are_least and "at least" in str(report)
    report = timed(Machine(), analysis, peak_flops=4e9, flops=6e9)
    assert report.flops == 6e9 and "at least" not in str(report)


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


@looped(
    "kind, teraflops",
    [("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA H100 PCIe", 756), ("TPU v5e", 197),
     ("TPU v5p", 459), ("NVIDIA A10", 125), ("NVIDIA A10G", None), ("cpu", None)],
)  # fmt: skip
def test_peaks_are_those_published(kind, teraflops):
    assert peak_flops(kind) == (None if teraflops is None else teraflops * 1e12)


# Real steps.

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


def twice_in_run(strategy):
    def both(w, x):
        strategy.run(product, (w, x))
        return strategy.run(product, args=(w,), kwargs={"x": x})

    return both


@looped("n, make, times", [(1, lambda s: s.run(product), 1), (4, twice_in_run, 2)])
def test_operations_of_all_replicas_are_those_counted_by_hand(n, make, times):
    strategy = js.MirroredStrategy(jax.devices()[:n])
    topology = js.Topology(bandwidth=4.0, latency=1.0, replicas=n)
    with strategy.profile(make(strategy), topology=topology, peak_flops=1e9) as step:
        assert float(step(*matrices(strategy))) == ROWS // n * IN * OUT
    report = step.report()
    assert report.flops == pytest.approx(times * BY_HAND, rel=0.05)
    assert not report.flops_are_least
    assert report.peak_flops == n * 1e9
    assert report.memory.peak > 4 * IN * OUT
    assert report.communication == times * topology.fastest("all_reduce", 4)


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


def test_a_jitted_function_on_several_devices():
    strategy = js.MirroredStrategy(jax.devices()[:4])
    w, _ = matrices(strategy)
    rows = jax.NamedSharding(strategy.mesh, jax.P("replica"))
    x = jax.device_put(np.ones((ROWS, IN), np.float32), rows)
    with strategy.profile(jax.jit(lambda w, x: x @ w)) as step:
        step(w, x)
    report = step.report()
    assert report.flops == pytest.approx(BY_HAND, rel=0.05)
    assert report.communication is None  # XLA may have put some in


@looped("around", [jax.jit, lambda f: lambda *args: jax.jit(f)(*args)])
def test_a_step_in_a_jitted_function_has_as_many_operations_or_more(around):
    strategy = js.MirroredStrategy(jax.devices()[:2])
    with strategy.profile(around(in_run(strategy))) as step:
        assert float(step(*matrices(strategy))) == ROWS // 2 * IN * OUT
    report = step.report()
    assert report.flops == pytest.approx(BY_HAND, rel=0.05)
    assert report.flops_are_least == (around is not jax.jit)


def test_without_compiling_nothing_is_known_of_operations():
    strategy = js.MirroredStrategy(jax.devices()[:2])
    with strategy.profile(strategy.run(product), compiled=False) as step:
        step(*matrices(strategy))
    report = step.report()
    assert report.flops is report.memory is None
    assert report.communication > 0


@looped("name", ["examples", "tokens", "flops", "peak_flops"])
def test_numbers_that_are_none(name):
    strategy = js.MirroredStrategy(jax.devices()[:2])
    with pytest.raises(ValueError, match=f"`{name}` was 0; a positive number was"):
        strategy.profile(product, **{name: 0})
