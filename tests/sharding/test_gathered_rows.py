"""Rows that only fill up a batch are left out of what is gathered, or told of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js

replica = js.get_replica_context


def last(strategy, array, size=8, **options):
    options = js.InputOptions(experimental_per_replica_buffer_size=0, **options)
    *_, out = strategy.experimental_distribute_dataset(js.batches(array, size), options)
    return out


def full(strategy, array, size=8, **options):
    return last(strategy, array[:size], size, **options)


def test_rows_are_left_out_however_their_axis_is_named(four):
    x, y = np.arange(10.0), np.arange(30.0).reshape(10, 3)
    np.testing.assert_array_equal(four.gather(last(four, x), 0), x[8:])
    np.testing.assert_array_equal(four.gather(last(four, x), -1), x[8:])
    np.testing.assert_array_equal(four.gather(last(four, y), -2), y[8:])


def test_in_a_merge_call_it_is_told_that_they_stay(four):
    def step(x):
        def merge(strategy, x):
            return strategy.gather(x)

        return replica().merge_call(merge, (x,))

    x = np.arange(10.0)
    np.testing.assert_array_equal(four.run(step, (full(four, x),)), x[:8])
    with pytest.warns(js.errors.PaddedRowsWarning, match="`step` was given a batch"):
        out = four.run(step, (last(four, x),))
    assert out.shape == (8,)


def test_so_it_is_in_a_step_that_knows_of_rows(four):
    @four.run
    def step(x):
        merged = replica().merge_call(lambda strategy, x: strategy.gather(x), (x,))
        return merged, replica().all_reduce("mean", js.masked_mean(x))

    x = np.arange(10.0)
    step(full(four, x))
    words = "and gathers an array of it in `merge_call`, where shapes are static"
    with pytest.warns(js.errors.PaddedRowsWarning, match=words):
        gathered, mean = step(last(four, x))
    assert gathered.shape == (8,) and mean == 8.5
    step(last(four, x))  # once is enough


def test_under_jit_it_is_told_that_they_stay(four):
    batch = last(four, np.arange(10.0))
    gather = jax.jit(four.gather)
    with pytest.warns(js.errors.PaddedRowsWarning, match="`gather` was given a batch"):
        assert gather(batch).shape == (8,)
    local = jax.jit(four.experimental_local_results)
    with pytest.warns(js.errors.PaddedRowsWarning, match="`experimental_local_results"):
        assert [rows.shape for rows in local(batch)] == [(2,)] * 4


@each_of("remainder", ["drop", "error"])
def test_where_all_rows_are_real_it_is_not(four, remainder):
    batch = full(four, np.arange(8.0), remainder=remainder)
    assert batch.mask is None
    np.testing.assert_array_equal(jax.jit(four.gather)(batch), np.arange(8.0))
    sums = jax.jit(lambda b: four.run(lambda x: x.sum(), (b,)))(batch)
    assert four.reduce("sum", sums) == 28
    assert four.gather(four.run(js.batch_mask, (batch,))).all()
    assert four.reduce("mean", four.run(js.masked_mean, (batch,))) == 3.5


LOSSES = np.arange(30.0).reshape(10, 3).astype(np.float32) ** 2


@each_of("n", [1, 4])
def test_a_mask_of_tokens_counts_those_of_real_rows(n):
    strategy = js.MirroredStrategy(jax.devices()[:n])
    lengths = np.arange(10) % 3 + 1
    batch = last(strategy, {"loss": LOSSES, "length": lengths})

    def step(batch):
        tokens = jnp.arange(3)[None] < batch["length"][:, None]
        loss = js.masked_mean(batch["loss"], mask=tokens)
        return loss, js.masked_sum(batch["loss"], mask=tokens)

    mean, total = strategy.run(step, (batch,))
    real = LOSSES[8:][np.arange(3)[None] < lengths[8:, None]]
    np.testing.assert_allclose(strategy.reduce("mean", mean), real.mean(), rtol=1e-6)
    np.testing.assert_allclose(strategy.reduce("sum", total), real.sum(), rtol=1e-6)


@each_of("axis", [1, -1, True, (0, 1)])
def test_other_axes_are_refused(two, axis):
    for mean in (js.masked_mean, js.masked_sum):
        words = f"`axis` of `{mean.__name__}` was .*; 0 for the rows or None for all"
        with pytest.raises(ValueError, match=words):
            two.run(lambda x, mean=mean: mean(x, axis=axis), (np.ones((2, 3)),))


@each_of("axis", [True, [1], 1.0, None])
def test_gather_refuses_another_axis_than_a_number_whatever_came_before(axis):
    strategy = js.MirroredStrategy(jax.devices()[:2])
    x = strategy.per_replica(np.ones((2, 3, 4), np.float32))
    for way in (strategy, js.get_strategy()):
        assert way.gather(x if way is strategy else np.ones((3, 4)), 1).shape[0] == 3
        with pytest.raises(TypeError, match="`axis` was .*; a whole number was wanted"):
            way.gather(x if way is strategy else np.ones((3, 4)), axis)
