"""Replicas are compared with one, on a clock that is made for the test."""

import re

import jax
import numpy as np
import pytest
from helpers.cases import looped

import jaxstrategy as js
from jaxstrategy.profiling import Comparison, compare


@pytest.fixture
def one():
    return js.OneDeviceStrategy("CPU:0")


@pytest.fixture
def four():
    return js.MirroredStrategy(jax.devices()[:4])


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


def test_medians_of_three_steps_are_compared(one, four):
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


@looped(
    "whole, part, all_, limit, lost",
    [(8.0, 2.0, 2.1, None, (0.0, 0.1)),
     (8.0, 6.0, 6.5, "small batch", (4.0, 0.5)),
     (8.0, 2.5, 6.5, "communication", (0.5, 4.0)),
     (8.0, 3.0, 2.5, None, (1.0, 0.0))],
)  # fmt: skip
def test_what_keeps_replicas_from_being_faster(whole, part, all_, limit, lost):
    found = Comparison(4, 64, whole, part, all_)
    assert found.speedup == whole / all_ and found.efficiency == whole / all_ / 4
    assert found.limit == limit
    assert (found.small_batch, found.communication) == pytest.approx(lost)
    # A bar as long as the time of the replicas.
    assert "<svg" in found._repr_html_()
    assert f"{all_:.3g} s" in found._repr_html_()


def test_a_profile_compares_before_its_loop(four):
    made = []

    def make(strategy, examples):
        n = strategy.num_replicas_in_sync
        made.append((type(strategy), n, examples))
        x = strategy.per_replica(np.ones((n, examples // n), np.float32))

        @strategy.run
        def step(x):
            return js.get_replica_context().all_reduce("mean", x.mean())

        return lambda: step(x)

    profile = four.profile(lambda: None, compare=make, examples=64)
    kind = js.MirroredStrategy
    assert made == [(kind, 1, 64), (kind, 1, 16), (kind, 4, 64)]
    report = profile.report()
    assert report.comparison.replicas == 4
    assert report.comparison.all > 0
    assert str(report.comparison) in str(report)
    assert "1 replica" in report._repr_html_()
    # Simulated devices are no further hardware.
    assert "are CPU devices, which share" in " ".join(str(report).split())


def test_one_replica_of_several_devices_is_compared_with_one_device():
    strategy = js.Strategy(jax.devices()[:4], logical_axes={"core": 2})
    seen = []

    def make(strategy, examples):
        seen.append(strategy.num_replicas_in_sync)
        return lambda: None

    strategy.profile(lambda: None, compare=make, examples=4)
    assert seen == [1, 1, 2]


@looped(
    "change, error, words",
    [({"examples": 6}, ValueError, "`examples` was 6, which 4 replicas cannot share"),
     ({"examples": 0}, ValueError, "`examples` was 0, which 4 replicas cannot share"),
     ({"repeats": 0}, ValueError, "`repeats` was 0; at least 1 was wanted"),
     ({"make": lambda s, n: 3}, TypeError, "`make` returned 3; a function that makes"),
     ({"one": "four"}, ValueError, "`one` has 4 replicas; a strategy of one was")],
)  # fmt: skip
def test_comparisons_that_mean_nothing(change, error, words, one, four):
    make = change.pop("make", lambda strategy, examples: lambda: None)
    first = four if change.pop("one", None) else one
    with pytest.raises(error, match=re.escape(words)):
        compare(make, first, four, **{"examples": 8, **change})


def test_a_comparison_needs_to_know_the_examples(four):
    words = "`compare` was given without `examples`"
    with pytest.raises(ValueError, match=words):
        four.profile(lambda: None, compare=lambda strategy, n: lambda: None)
