"""`compute_average_loss` of batches with filled-up rows; the oracle is NumPy."""

import jax
import numpy as np
import pytest

import jaxstrategy as js

ROWS = np.random.default_rng(1).normal(size=11).astype(np.float32)


def summed(strategy, loss_of, source):
    """The sum over the replicas of each batch's loss, and of its gradient by w = 1."""

    @strategy.run
    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: loss_of((w * batch) ** 2))(w)
        return js.get_replica_context().all_reduce("sum", (loss, grad))

    return [
        np.stack(step(1.0, batch))
        for batch in strategy.experimental_distribute_dataset(source)
    ]


def wanted(rows, size=None):
    mean = (rows.astype(np.float64) ** 2).sum() / (size or len(rows))
    return np.array([mean, 2 * mean])


def test_filled_up_rows_do_not_count(strategy):
    source = [ROWS[:8], ROWS[8:]]
    found = summed(strategy, js.training.compute_average_loss, source)
    for got, rows in zip(found, source, strict=True):
        np.testing.assert_allclose(got, wanted(rows), rtol=1e-5)


def test_they_do_not_count_with_a_size_or_weights(four):
    def sized(losses):
        return js.training.compute_average_loss(losses, global_batch_size=8)

    (got,) = summed(four, sized, [ROWS[:5]])
    np.testing.assert_allclose(got, wanted(ROWS[:5], 8), rtol=1e-5)

    def weighted(losses):
        return js.training.compute_average_loss(losses, sample_weight=2.0)

    (got,) = summed(four, weighted, [ROWS[:5]])
    np.testing.assert_allclose(got, 2 * wanted(ROWS[:5]), rtol=1e-5)


def test_a_mask_takes_their_place(two):
    def step(x):
        loss = js.training.compute_average_loss(x, mask=x > 1)
        return js.get_replica_context().all_reduce("sum", loss)

    x = two.per_replica([[0.0, 1.0], [2.0, 4.0]])
    assert two.run(step, (x,)) == 3
    with pytest.raises(ValueError, match=r"`mask` has shape \(3,\)"):
        two.run(
            lambda x: js.training.compute_average_loss(x, mask=np.ones(3, bool)), (x,)
        )


def test_losses_of_other_rows_are_counted_as_they_are(two):
    def per_token(losses):
        return js.training.compute_average_loss(losses.repeat(3))

    (got,) = summed(two, per_token, [ROWS[:4]])
    np.testing.assert_allclose(got, wanted(ROWS[:4]), rtol=1e-5)
