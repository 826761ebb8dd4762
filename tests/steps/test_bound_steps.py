"""Bound steps write their objects' arrays without asking again, and as rightly."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.profiled import python_calls
from jax.core import Tracer

import jaxstrategy as js

OFTEN = 4


class Sums(nnx.Module):
    def __init__(self, count):
        self.totals = nnx.List([nnx.Variable(jnp.zeros(2)) for _ in range(count)])


def add(sums, x):
    mean = js.get_replica_context().all_reduce("mean", x)
    for total in sums.totals:
        total[...] += mean


def test_a_call_makes_few_calls_of_python_however_many_variables_there_are(two):
    x = two.per_replica([1.0, 3.0])
    counts = []
    for count in (2, 40):
        sums = Sums(count)
        step = two.run(add).bind(sums)
        for _ in range(OFTEN):
            step(x)
        counts.append(len(python_calls(lambda step=step: step(x))))
        np.testing.assert_array_equal(sums.totals[-1][...], [10.0, 10.0])
    assert max(counts) <= min(counts) + 5 <= 40, counts


def test_a_trace_is_noticed_after_calls_outside_of_any(two):
    sums, x = Sums(1), two.per_replica([1.0, 3.0])
    step = two.run(add).bind(sums)
    for _ in range(OFTEN):
        step(x)
    with pytest.raises(js.errors.ObjectError, match="inside a function that JAX"):
        jax.jit(lambda: step(x))()
    np.testing.assert_array_equal(sums.totals[0][...], np.full(2, 2.0 * OFTEN))
    step(x)
    np.testing.assert_array_equal(sums.totals[0][...], np.full(2, 2.0 * OFTEN + 2))


class Watched(nnx.Variable):
    """A variable of a user who wants to know of each value."""

    def set_raw_value(self, value, **options):
        SEEN.append(value)
        super().set_raw_value(value, **options)


SEEN = []


def test_a_variable_with_a_setter_of_its_own_is_set_by_it(two):
    sums, x = Sums(1), two.per_replica([1.0, 3.0])
    sums.totals[0] = Watched(jnp.zeros(2))
    step = two.run(add).bind(sums)
    before = len(SEEN)
    for _ in range(OFTEN):
        step(x)
    assert sum(not isinstance(value, Tracer) for value in SEEN[before:]) == 4
    assert sums.totals[0].get_raw_value() is SEEN[-1]


def test_arrays_that_the_objects_have_no_more_are_not_kept(two):
    sums, x = Sums(1), two.per_replica([1.0, 3.0])
    first = weakref.ref(sums.totals[0].get_raw_value())
    step = two.run(add).bind(sums)
    step(x)
    second = weakref.ref(sums.totals[0].get_raw_value())
    assert first() is None
    step(x)
    assert second() is None
