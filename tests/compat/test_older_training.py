"""Training loops of TensorFlow 1: moving means, and batches with too few rows.

The moving means were measured with TensorFlow 2.21.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.older import of_kind, versions

import jaxstrategy as js
from jaxstrategy.compat import v1


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
