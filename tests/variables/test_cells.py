"""What variables hold between steps: arrays that steps borrow, or references."""

import threading

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


def test_a_value_that_was_assigned_outlives_the_next_steps(made):
    strategy, v = made
    given, step = jnp.ones(3), strategy.run(lambda x: v.assign_add(x * jnp.ones(3)))
    mirrored = strategy.mirror(given)
    for start in (given, mirrored, v.value(), np.ones(3, np.float32)):
        v.assign(start)
        step(1.0)
        step(1.0)
    for array in (given, mirrored):
        np.testing.assert_array_equal(array, np.ones(3))
    np.testing.assert_array_equal(v.value(), np.full(3, 3.0))


@pytest.mark.filterwarnings("ignore::jaxstrategy.RecompilationWarning")
def test_what_a_variable_starts_with_is_the_users(strategy):
    for start in (jnp.ones(3), strategy.mirror(jnp.ones(3)), np.ones(3, np.float32)):
        with strategy.scope():
            v = js.Variable(start)
        step = strategy.run(lambda x, v=v: v.assign_add(x * jnp.ones(3)))
        step(1.0)
        step(1.0)
        np.testing.assert_array_equal(start, np.ones(3))
        np.testing.assert_array_equal(v.value(), np.full(3, 3.0))


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


def test_in_a_loop_of_the_users(made):
    strategy, v = made
    step = strategy.run(lambda x: v.assign_add(x * jnp.ones(3)))
    step(1.0)

    def body(c, _):
        step(c)
        return c, None

    jax.lax.scan(body, 1.0, length=3)
    step(1.0)
    np.testing.assert_array_equal(v.value(), np.full(3, 5.0))


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


def test_steps_compile_once(made, compilations):
    strategy, v = made
    step = strategy.run(lambda x: v.assign_add(x * jnp.ones(3)))
    step(1.0), step(1.0)
    compilations()
    for _ in range(3):
        step(1.0)
    assert compilations() == 0


def test_updating_is_in_place(two):
    with two.scope():
        v = js.Variable(np.zeros(1000, np.float32))
    step = two.run(lambda x: v.assign_add(x * jnp.ones(1000)) is None)
    step(1.0)
    memory = two.explain(step, (1.0,)).memory
    assert memory.donated >= 4000


def test_the_first_call_in_several_threads(two):
    for _ in range(5):
        with two.scope():
            v = js.Variable(0.0)
        step, failed = two.run(lambda x, v=v: v.assign_add(x)), []

        def work(step=step, failed=failed):
            try:
                for _ in range(5):
                    step(1.0)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed and v.value() == 20.0
