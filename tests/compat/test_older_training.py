"""Training loops of TensorFlow 1: moving means, and batches with too few rows.

The moving means were measured with TensorFlow 2.21.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.older import of_kind, versions

import jaxstrategy as js
from jaxstrategy.compat import v1


@pytest.mark.parametrize(
    "kind, n, momentum, wanted",
    [
        ("one", 1, 0.8, [(12.0, 12.2), (21.6, 21.96)]),
        ("default", 1, 0.8, [(12.0, 12.2), (21.6, 21.96)]),
        ("mirrored", 2, 0.8, [(22.0, 22.2), (39.6, 39.96)]),
        ("central", 2, 0.8, [(22.0, 22.2), (39.6, 39.96)]),
        ("mirrored", 4, 0.9, [(21.0, 21.1), (39.9, 40.09)]),
    ],
)
@pytest.mark.parametrize("iterations", [1, 2])
def test_moving_means(kind, n, momentum, wanted, iterations):
    strategy = of_kind(kind, n)
    with strategy.scope():
        moving = js.Variable(
            jnp.zeros(3), synchronization="on_read", aggregation="mean"
        )
    # Replica r sees rows whose mean is 60 + i + 100 r in column i.
    rows = 60 + np.arange(3.0) + 100 * np.arange(n)[:, None, None] + [[-1.0], [1.0]]

    def input_fn(context):
        return [*np.float32(rows)] * 2

    def step(context, x):
        moving.assign_sub((1 - momentum) * (moving - x.mean(0)))
        context.set_last_step_output("mean", x.mean(), v1.ReduceOp.MEAN)

    def fn(context, x):
        strategy.extended.call_for_each_replica(step, args=(context, x))

    iterator = strategy.make_input_fn_iterator(input_fn)
    run = strategy.extended.experimental_run_steps_on_iterator
    for place in range(iterations - 1, 2, iterations):
        context = run(fn, iterator, iterations)
        found = strategy.extended.read_var(moving)
        np.testing.assert_allclose(found[:2], wanted[place], rtol=1e-6)
    assert float(context.last_step_outputs["mean"]) == 61 + 50 * (n - 1)


@pytest.mark.parametrize("kind, n", [("mirrored", 2), ("mirrored", 4), ("one", 1)])
def test_training_with_a_last_batch_of_few_rows(kind, n):
    strategy = of_kind(kind, n)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 2)), rng.normal(size=10)
    with strategy.scope():
        w = js.Variable(jnp.zeros(2), aggregation="mean")

    def step(context, x, y):
        def loss():
            return js.masked_mean((x @ w - y) ** 2)

        value, (grad,) = js.value_and_grad(loss, [w])()
        context.set_last_step_output("loss", value, v1.ReduceOp.MEAN)
        replica = v1.get_replica_context()
        w.assign_sub(0.1 * replica.all_reduce(v1.ReduceOp.MEAN, grad))

    def fn(context, element):
        strategy.run(step, (context, *element))

    rows = strategy.experimental_make_numpy_dataset((np.float32(x), np.float32(y)))
    iterator = strategy.make_dataset_iterator(rows.batch(4))
    run = strategy.extended.experimental_run_steps_on_iterator
    losses = []
    for _ in range(3):  # passes
        iterator.initialize()
        for _ in range(3):
            context = run(fn, iterator)
            losses.append(float(context.last_step_outputs["loss"]))
    # A plain loop over the same batches.
    wanted, at = [], np.zeros(2)
    for start in (0, 4, 8) * 3:
        own = slice(start, start + 4)
        errors = x[own] @ at - y[own]
        wanted.append((errors**2).mean())
        at = at - 0.1 * 2 * x[own].T @ errors / len(errors)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(w.value()), at, rtol=1e-5)


def test_local_results_are_the_real_rows():
    strategy = of_kind("mirrored", 4)
    rows = strategy.experimental_make_numpy_dataset(np.arange(6))
    iterator = strategy.make_dataset_iterator(rows.batch(6))
    element = iterator.get_next()
    found = [x.tolist() for x in strategy.experimental_local_results(element)]
    assert sum(found, []) == [0, 1, 2, 3, 4, 5]
    assert versions(strategy, strategy.run(js.masked_sum, (element,))) == [1, 5, 9, 0]
