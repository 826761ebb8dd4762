"""Metrics of Flax NNX in a step; the oracle is NumPy, or the metric on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxstrategy as js

ROWS = np.random.default_rng(0).normal(size=(13, 3)).astype(np.float32)
LABELS = np.arange(13) % 3


def made():
    return nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(),
        loss=nnx.metrics.Average("loss"),
        spread=nnx.metrics.Welford("loss"),
    )


def evaluated(strategy, batch_size):
    metrics = made()

    @strategy.run
    def evaluate(metrics, logits, labels):
        loss = jnp.abs(logits).sum(-1)
        js.flax.nnx.update_metrics(metrics, logits=logits, labels=labels, loss=loss)

    data = js.batches((ROWS, LABELS), batch_size)
    for batch in strategy.experimental_distribute_dataset(data):
        evaluate(metrics, *batch)
    return metrics.compute()


def test_each_example_counts_once(four):
    found = evaluated(four, 5)
    loss = np.abs(ROWS).sum(-1)
    np.testing.assert_allclose(found["loss"], loss.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["accuracy"], (ROWS.argmax(-1) == LABELS).mean())
    np.testing.assert_allclose(found["spread"].mean, loss.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        found["spread"].standard_deviation, loss.std(), rtol=1e-4
    )


def test_a_metric_of_every_token(two):
    """A metric over `[rows, time]`, where a mask of rows would not fit."""
    metric = nnx.metrics.Average()
    tokens = np.arange(6.0, dtype=np.float32).reshape(3, 2)

    @two.run
    def evaluate(metric, tokens):
        js.flax.nnx.update_metrics(metric, values=tokens)

    for batch in two.experimental_distribute_dataset([tokens]):
        evaluate(metric, batch)
    assert metric.compute() == tokens.mean() and metric.count[...] == 6


def test_a_mask_and_numbers_are_taken(two):
    metrics = nnx.MultiMetric(x=nnx.metrics.Average("x"), y=nnx.metrics.Average("y"))

    @two.run
    def evaluate(metrics, x):
        mean = js.get_replica_context().all_reduce("mean", x.mean())
        js.flax.nnx.update_metrics(metrics, mask=x > 1, x=x, y=mean)

    evaluate(metrics, two.per_replica([[0.0, 1.0], [2.0, 4.0]]))
    found = metrics.compute()
    assert found == {"x": 3.0, "y": 1.75}


def test_without_a_strategy():
    metrics = made()
    js.flax.nnx.update_metrics(metrics, logits=ROWS, labels=LABELS, loss=ROWS.sum(-1))
    want = made()
    want.update(logits=ROWS, labels=LABELS, loss=ROWS.sum(-1))
    for found, wanted in zip(
        jax.tree.leaves(nnx.state(metrics)),
        jax.tree.leaves(nnx.state(want)),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_mistakes_are_told(two):
    metric = nnx.metrics.Average("x")

    def update(**values):
        two.run(lambda: js.flax.nnx.update_metrics(metric, **values))

    with pytest.raises(ValueError, match="no array with one entry for each example"):
        update(x=1.0)
    with pytest.raises(ValueError, match="`y` has 3 rows, but `x` has 2"):
        update(x=jnp.ones(2), y=jnp.ones(3))
    with pytest.raises(ValueError, match=r"`mask` has shape \(3,\)"):
        update(x=jnp.ones(2), mask=np.ones(3, bool))
    with two.scope(), pytest.raises(js.errors.ContextError, match="`update_metrics`"):
        js.flax.nnx.update_metrics(metric, x=jnp.ones(2))
    assert metric.count[...] == 0
    metrics = made()

    @two.run
    def step(metrics, logits, labels):
        loss = logits.sum(-1).mean()
        js.flax.nnx.update_metrics(metrics, logits=logits, labels=labels, loss=loss)

    (batch,) = two.experimental_distribute_dataset([(ROWS, LABELS)])
    told = "update metrics with `jaxstrategy.flax.nnx.update_metrics`, given what each"
    with pytest.raises(js.errors.NotMirroredError, match=told):
        step(metrics, *batch)
