"""Other ways to run Keras' loops, and other mistakes, under a strategy."""

import contextlib

import jax
import keras
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.keras_models import compiled

import jaxstrategy as js

pytestmark = pytest.mark.usefixtures("ranks_may_differ")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)
NOWHERE = contextlib.nullcontext()


@pytest.fixture(scope="module")
def four():
    return js.MirroredStrategy(js.simulate(8)[:4])


def are_equal(have, want):
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def of_both(strategy, program):
    """What a program gives under a strategy, and what it gives under none."""
    return [program(scope) for scope in (strategy.scope(), NOWHERE)]


class Looking(keras.layers.Layer):
    """Notes where the rows lie that a compiled step gives it."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def call(self, x):
        jax.debug.inspect_array_sharding(x, callback=self.note)
        return x


def test_a_step_that_a_model_overrides_has_divided_rows(four):
    seen = []

    class Mine(keras.Model):
        def __init__(self):
            super().__init__()
            self.looking = Looking(lambda sharding: seen.append(sharding))
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(self.looking(x))

        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return logs | {"twice": logs["loss"] * 2}, state

    def history(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = Mine()
            model.compile(optimizer="sgd", loss="mse")
        return model.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history

    have, want = of_both(four, history)
    are_equal(have, want)
    assert set(want) == {"loss", "twice"}
    assert (2, 4) in {sharding.shard_shape((8, 4)) for sharding in seen}


@each_of("method", ["fit", "evaluate", "predict"])
def test_datasets_of_ours_are_refused(four, method):
    with four.scope():
        model = compiled(4)
    batches = js.batches((X, Y), 4)
    datasets = batches, four.experimental_distribute_dataset(batches)
    for data in (*datasets, iter(datasets[1])):
        told = rf"`{method}` was given .*: give arrays of all rows with `batch_size`"
        with pytest.raises(TypeError, match=told):
            getattr(model, method)(data, verbose=0)
    with pytest.raises(TypeError, match=told):
        getattr(model, method)(x=batches)
    generator = (batch for batch in batches)
    assert np.isfinite(model.evaluate(generator, steps=5, verbose=0)[0])


def test_where_keras_cannot_follow_it_is_refused_and_variables_are_not(
    four, monkeypatch
):
    servers = js.ParameterServerStrategy(
        workers=1, parameter_servers=1, backend="threads"
    )
    with servers.scope(), pytest.raises(ValueError, match="are on parameter servers"):
        compiled(4)
    servers.close()
    shared = js.MirroredStrategy(js.simulate(8)[:2], replicas_per_device=2)
    for strategy in (four, shared):  # the second could train no model of Keras
        with strategy.scope():
            total = js.Variable(0.0, aggregation="sum")
        strategy.run(lambda v: v.assign_add(1.0), (total,))
        assert float(total.value()) == 4.0
    assert keras.distribution.distribution() is None
    model = compiled(4)
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    with (
        four.scope(),
        pytest.raises(ValueError, match="KERAS_BACKEND=jax before Keras"),
    ):
        compiled(4)
    assert model.built
