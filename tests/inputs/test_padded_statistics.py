"""BatchNorm of batches that are filled up; the oracle is NumPy on the real rows."""

import traceback

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.cases import each_of

import jaxstrategy as js


def rows(n):
    x = np.random.default_rng(n).normal(size=(n, 2, 3)) + np.arange(n).reshape(-1, 1, 1)
    return x.astype(np.float32)


def linen_layer():
    layer = js.flax.linen.BatchNorm(use_running_average=False, momentum=0.0)
    stats = {"mean": jnp.zeros(3), "var": jnp.ones(3)}
    scale = {"scale": jnp.ones(3), "bias": jnp.zeros(3)}

    def normalized(x):
        y, changed = layer.apply(
            {"params": scale, "batch_stats": stats}, x, mutable=["batch_stats"]
        )
        return y, changed["batch_stats"]["mean"], changed["batch_stats"]["var"]

    return normalized


def nnx_layer():
    def normalized(x):
        layer = js.flax.nnx.BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(0))
        return layer(x), layer.mean[...], layer.var[...]

    return normalized


def only_batch(strategy, x):
    (batch,) = strategy.experimental_distribute_dataset([x])
    return batch


@each_of("layer", [linen_layer, nnx_layer])
def test_rows_that_fill_up_a_batch_do_not_count_unasked(four, layer):
    normalized = layer()

    @four.run
    def step(x):
        y, mean, var = normalized(x)
        return js.masked_sum(y.sum((1, 2)) ** 2), mean, var

    x = rows(5)
    total, mean, var = step(only_batch(four, x))
    np.testing.assert_allclose(mean, x.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(var, x.var((0, 1)), rtol=1e-4)
    want = (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-5)
    np.testing.assert_allclose(
        four.reduce("sum", total), (want.sum((1, 2)) ** 2).sum(), rtol=1e-4
    )


def test_the_layer_asks_nothing_for_the_step(four):
    normalized = nnx_layer()

    @four.run
    def step(x):
        return js.get_replica_context().all_reduce("mean", normalized(x)[0].mean())

    with pytest.warns(js.errors.PaddedRowsWarning, match="never asked which rows are"):
        step(only_batch(four, rows(5)))


def test_an_error_of_a_step_with_variables_stands_alone(four):
    with four.scope():
        value = js.Variable(0.0)

    @four.run(options=js.RunOptions(check_finite=True))
    def step(x):
        return jnp.log(value * x)

    with pytest.raises(js.NonFiniteError) as caught:
        step(four.per_replica([1.0, 2.0, 3.0, 4.0]))
    told = "".join(traceback.format_exception(caught.value))
    assert told.count("During handling of the above exception") == 0
