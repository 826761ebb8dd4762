"""`strategy.accumulate`: a large batch in several small ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js


def loss(w, x, y):
    return ((x @ w - y) ** 2).mean()


@pytest.fixture
def batch(strategy):
    n = strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 12, 3)).astype(np.float32)
    return x, x.sum(-1) + 1


def numpys_gradient(w, x, y):
    """Of the mean over all rows of all replicas."""
    x, y = x.reshape(-1, 3), y.reshape(-1)
    return 2 * x.T @ (x @ w - y) / len(x)


@pytest.mark.parametrize("k", [1, 3])
def test_the_gradient_is_that_of_the_whole_batch(strategy, batch, k):
    @strategy.run
    def step(w, x, y):
        gradient = strategy.accumulate(k)(lambda x, y: jax.grad(loss)(w, x, y))
        return replica().all_reduce("mean", gradient(x, y))

    w = np.array([1.0, -2.0, 0.5], np.float32)
    found = step(w, *map(strategy.per_replica, batch))
    np.testing.assert_allclose(found, numpys_gradient(w, *batch), rtol=1e-5)


def test_sums_and_what_is_kept_of_each_part(two):
    def step(x):
        @two.accumulate(3, op="sum", has_aux=True)
        def total(x):
            return x.sum(), {"first": x[0], "whole": x}

        return total(x)

    x = np.arange(12.0, dtype=np.float32).reshape(2, 6)
    total, aux = two.run(step, (two.per_replica(x),))
    np.testing.assert_array_equal(total.stacked, x.sum(1))
    np.testing.assert_array_equal(aux["first"].stacked, x[:, ::2])
    np.testing.assert_array_equal(aux["whole"].stacked, x.reshape(2, 3, 2))


def test_random_keys_differ_from_part_to_part(two):
    def step(key):
        @two.accumulate(4, has_aux=True)
        def draw(key):
            return 0.0, jax.random.uniform(key)

        return draw(key)[1]

    drawn = np.asarray(two.run(step, (jax.random.key(7),)))
    expected = [
        jax.random.uniform(jax.random.fold_in(jax.random.key(7), i)) for i in range(4)
    ]
    np.testing.assert_array_equal(drawn, expected)
    assert len(set(drawn.tolist())) == 4


def test_numbers_of_16_bits_are_summed_in_32(two):
    def step(x):
        return two.accumulate(256, op="sum")(lambda x: x.sum())(x)

    x = two.per_replica(np.full((2, 256), 1.0078125, jnp.bfloat16))
    found = two.run(step, (x,))
    assert found.dtype == jnp.bfloat16
    # One by one in bfloat16 the sum would stop growing at 256.
    np.testing.assert_allclose(np.asarray(found.stacked, np.float32), 258.0, rtol=0.004)


def test_the_mean_of_whole_numbers_is_a_float(two):
    found = two.run(lambda x: two.accumulate(2)(jnp.sum)(x), (jnp.arange(4),))
    assert (found.dtype, float(found)) == (jnp.float32, 3.0)


def test_one_reduction_outside_of_the_loop(four):
    def step(w, x, y):
        gradient = four.accumulate(4)(lambda x, y: jax.grad(loss)(w, x, y))
        return replica().all_reduce("mean", gradient(x, y))

    x = four.per_replica(np.ones((4, 8, 3), np.float32))
    y = four.per_replica(np.ones((4, 8), np.float32))
    (found,) = four.explain(step, (np.ones(3, np.float32), x, y)).collectives
    assert (found.operation, found.loops) == ("psum", ())


def test_memory_is_that_of_one_part(two):
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    x = js.PerReplica(jax.ShapeDtypeStruct((2, 1024, 256), jnp.float32))

    def deep(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def temporary(k):
        def step(w, x):
            return two.accumulate(k)(lambda x: jax.grad(deep)(w, x))(x)

        return two.explain(step, (w, x)).memory.temporary

    assert temporary(16) < temporary(1) / 4


def test_variables_count_the_parts(two):
    with two.scope():
        parts = js.Variable(0, synchronization="on_read", aggregation="sum")

    @two.run
    def step(x):
        @two.accumulate(3)
        def gradient(x):
            parts.assign_add(1)
            return x.sum()

        return gradient(x)

    step(two.per_replica(np.ones((2, 6), np.float32)))
    assert parts.numpy() == 6


def test_it_works_with_no_strategy_at_all():
    total = js.get_strategy().accumulate(2, op="sum")(jnp.sum)
    assert total(jnp.arange(4)) == 6


def test_bad_numbers_of_parts(two):
    with pytest.raises(ValueError, match="`k` was 0; a batch has at least one part"):
        two.accumulate(0)
    with pytest.raises(TypeError, match="`k` was 1.5; the number of parts of a batch"):
        two.accumulate(1.5)
    with pytest.raises(ValueError, match="`op` was 'max'; parts of a batch are summed"):
        two.accumulate(2, op="max")


def test_rows_that_do_not_divide_are_named(two):
    with pytest.raises(ValueError, match=r"argument \[0\]\['x'\] has 6 rows on each"):
        two.run(
            lambda b: two.accumulate(4)(lambda b: b["x"].sum())(b),
            ({"x": two.per_replica(np.ones((2, 6)))},),
        )


def test_sparse_results_are_refused(two):
    def step(x):
        def rows(x):
            return js.IndexedSlices(x[:, None], jnp.zeros(len(x), int), (3, 1))

        return two.accumulate(2)(rows)(x)

    with pytest.raises(TypeError, match="returns IndexedSlices"):
        two.run(step, (np.ones(4, np.float32),))


def test_a_reduction_inside_is_done_for_each_part(four):
    def step(x):
        return four.accumulate(2)(lambda x: lax.psum(x.sum(), "replica"))(x)

    x = four.per_replica(np.ones((4, 6), np.float32))
    (found,) = four.explain(step, (x,)).collectives
    assert found.times == 2
    assert float(four.run(step, (x,))) == 12
