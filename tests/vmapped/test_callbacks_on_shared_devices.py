"""Callbacks of replicas that share devices: once for each that comes to them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids
from jax import lax
from jax.experimental import io_callback

import jaxstrategy as js

FLOAT = jax.ShapeDtypeStruct((), np.float32)


def replies(strategy, step):
    """What a step's callbacks were called with, and its results."""
    found = []

    def tell(x):
        found.append(float(x))
        return np.float32(x)

    results = strategy.run(functools.partial(step, tell=tell), (ids(strategy),))
    jax.effects_barrier()
    return sorted(found), np.asarray(results.stacked)


def test_each_replica_calls_once(eight):
    def step(x, tell):
        jax.debug.callback(tell, x)
        # A method for batches is not used.
        pure = jax.pure_callback(tell, FLOAT, x, vmap_method="expand_dims")
        return 2 * pure + io_callback(tell, FLOAT, x + 10)

    found, results = replies(eight, step)
    assert found == sorted([*range(8), *range(8), *range(10, 18)])
    np.testing.assert_array_equal(results, 3 * np.arange(8) + 10)


def test_an_ordered_callback_is_called_in_order(eight):
    def step(x, tell):
        first = io_callback(tell, FLOAT, x, ordered=True)
        return io_callback(tell, FLOAT, first + 10, ordered=True)

    found, results = replies(eight, step)
    assert found == [*range(8), *range(10, 18)]
    np.testing.assert_array_equal(results, np.arange(10, 18))


def callback(tell, x):
    jax.debug.callback(tell, x)


def pure(tell, x):
    return jax.pure_callback(tell, FLOAT, x)


def with_effects(tell, x):
    return io_callback(tell, FLOAT, x)


@each_of("call", [callback, pure, with_effects])
def test_a_branch_calls_for_those_that_take_it(eight, call):
    def step(x, tell):
        def yes():
            call(tell, x)
            return x + 1

        # What is not used is not computed, but for its effects.
        value = lax.cond(x > 3, yes, lambda: x)
        again = pure(tell, value) if call is pure else value
        return lax.cond(x > 5, lambda: again, lambda: x)

    found, results = replies(eight, step)
    expected = list(range(4, 8)) if call is not pure else found
    assert found == expected
    np.testing.assert_array_equal(results, [0, 1, 2, 3, 4, 5, 7, 8])


def test_a_loop_calls_until_its_replica_has_ended(eight):
    def step(x, tell):
        def turn(value):
            jax.debug.callback(tell, value)
            return value + 3

        return lax.while_loop(lambda value: value < 5, turn, x)

    found, results = replies(eight, step)
    wanted = [value for i in range(8) for value in range(i, 5, 3)]
    assert found == sorted(wanted)
    np.testing.assert_array_equal(results, [6, 7, 5, 6, 7, 5, 6, 7])


def test_a_callback_where_only_a_group_comes_is_refused(eight):
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def step(x, tell):
        total = lax.psum(x, "replica", axis_index_groups=groups)

        def yes():
            jax.debug.callback(tell, x)
            return lax.psum(x, "replica", axis_index_groups=groups)

        return lax.cond(total > 10, yes, lambda: x)

    with pytest.raises(NotImplementedError, match="(?s)`cond` has a callback and a"):
        replies(eight, step)


def test_infinities_are_looked_for_on_each_replica(eight):
    options = js.RunOptions(check_finite=True)
    with pytest.raises(js.NonFiniteError, match="on replicas 0, 1, 2, 3 of 8"):
        eight.run(lambda x: jnp.log(x - 3), (ids(eight),), options=options)
