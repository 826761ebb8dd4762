"""What variables hold between steps: arrays that steps borrow, or references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js


@pytest.fixture(params=["on_write", "on_read"])
def made(request, strategy):
    with strategy.scope():
        return strategy, js.Variable(
            np.zeros(3), synchronization=request.param, aggregation="mean"
        )


def test_a_value_that_was_read_outlives_the_next_steps(made):
    strategy, v = made
    step = strategy.run(lambda x: v.assign_add(x * jnp.ones(3)))
    seen = []
    for _ in range(4):
        seen.append((v.value(), v.distributed(), v.numpy()))
        step(1.0)
        step(1.0)
    for i, values in enumerate(seen):
        for value in (values[0], values[2]):
            np.testing.assert_array_equal(value, np.full(3, 2.0 * i))
        copies = strategy.experimental_local_results(values[1])
        np.testing.assert_array_equal(copies[-1], np.full(3, 2.0 * i))


@pytest.mark.slow
def test_steps_alone_and_in_functions_that_jax_traces_take_turns(made):
    strategy, v = made
    step = strategy.run(lambda x: v.assign_add(x * jnp.ones(3)))

    @jax.jit
    def twice(x):
        step(x)
        step(x)
        return v.value()[0]

    @jax.jit
    def look():
        return v.value()[0]

    step(1.0)
    total = 1.0
    for _ in range(3):
        twice(1.0)
        step(1.0)
        total += 3
        assert look() == total == v.value()[0]
    v.assign(np.zeros(3))
    assert look() == 0.0
    step(1.0)
    assert look() == 1.0


def test_some_variables_become_references(strategy):
    with strategy.scope():
        v, w = js.Variable(0.0), js.Variable(0.0)

    @strategy.run
    def step(x):
        v.assign_add(x)
        w.assign_add(2 * x)

    step(1.0)
    assert jax.jit(lambda: v.value() + 1)() == 2.0
    step(1.0)
    step(1.0)
    assert (v.value(), w.value()) == (3.0, 6.0)
    assert v.cell.is_reference and not w.cell.is_reference
