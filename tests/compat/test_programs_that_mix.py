"""A program that moves from TensorFlow 1 to today piece by piece, and is debugged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxstrategy as js
from jaxstrategy.compat import v1 as distribute

ROWS = np.random.default_rng(2).normal(size=(16, 3)).astype(np.float32)
TARGETS = (ROWS @ [[1.0], [2.0], [3.0]] + 0.5).astype(np.float32)


@pytest.fixture
def older():
    return distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])


@pytest.mark.slow
def test_a_model_of_today_in_an_older_loop(older, capsys):
    with older.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        chain = optax.chain(js.optax.all_reduce_gradients("mean"), optax.sgd(0.1))
        optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)
        steps = distribute.get_variable(
            "steps", initializer=0.0, aggregation=js.VariableAggregation.SUM
        )
        rows = older.experimental_make_numpy_dataset((ROWS, TARGETS))
        iterator = older.make_dataset_iterator(rows.batch(8))
    kernel = np.float64(jax.device_get(model.kernel[...]))
    bias = np.zeros(1)

    def step(x, y):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, gradients)
        steps.assign_add(1.0)
        return loss

    def shown(x, y):
        replica = distribute.get_replica_context().replica_id_in_sync_group
        if replica == 1:  # only the devices know it in a compiled step
            print("replica", replica, "has", len(x), "rows")
        return step(x, y)

    strategy = js.get_strategy
    found = []
    with older.scope():
        found.append(strategy().run(step, iterator.get_next()))
        with pytest.raises(
            js.errors.TracedValueError,
            match=r"with js.experimental.eager_replicas\(\):",
        ):
            strategy().run(shown, (ROWS[:2], TARGETS[:2]))
        with js.experimental.eager_replicas():
            found.append(strategy().run(shown, iterator.get_next()))
        found = [float(strategy().reduce("mean", loss)) for loss in found]
    wanted = []
    for own in (slice(0, 8), slice(8, 16)):
        errors = ROWS[own] @ kernel + bias - TARGETS[own]
        wanted.append((errors**2).mean())
        kernel = kernel - 0.1 * 2 * ROWS[own].T @ errors / 8
        bias = bias - 0.1 * 2 * errors.mean(0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(model.kernel[...], kernel, rtol=1e-4)
    assert float(steps) == 4
    assert capsys.readouterr().out == "replica 1 has 4 rows\n"


def test_one_replica_fails_while_the_other_waits(older):
    def step():
        context = distribute.get_replica_context()
        if context.replica_id_in_sync_group == 1:
            raise KeyError("no such word")
        return context.all_reduce(distribute.ReduceOp.SUM, 1.0)

    with (
        pytest.raises(KeyError, match="no such word") as caught,
        js.experimental.eager_replicas(),
    ):
        older.run(step)
    (note,) = caught.value.__notes__
    assert "Replica 1 of `step` raised this" in note
    assert "Replica 0 waits at all_reduce('sum')" in note
    assert "test_programs_that_mix.py" in note and "return context.all_reduce" in note


def test_an_uneven_collective_of_an_older_context(older):
    def step():
        context = distribute.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            return context.all_reduce(distribute.ReduceOp.SUM, jnp.ones(2))
        return jnp.zeros(2)

    told = r"replica 0 waits at all_reduce\('sum'\) of float32\[2\]: .*context.all_redu"
    with (
        pytest.raises(js.errors.DivergentCollectiveError, match=told),
        js.experimental.eager_replicas(),
    ):
        older.run(step)
