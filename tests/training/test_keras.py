"""Keras models in `run`, called in ways for which there is `js.keras`."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import pytest

import jaxstrategy as js

pytestmark = pytest.mark.usefixtures("ranks_may_differ")


def network(norm):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((3,)), keras.layers.Dense(4), norm(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    return model, optimizer


@pytest.fixture(scope="module")
def two():
    return js.MirroredStrategy(js.simulate(8)[:2])


def test_a_model_that_would_train_in_place_is_refused_and_kept(two):
    model, optimizer = network(keras.layers.BatchNormalization)
    before = [np.asarray(v.value) for v in (*model.variables, *optimizer.variables)]
    x = two.per_replica(np.ones((2, 4, 3), np.float32))

    def call(x):
        return model(x, training=True)

    def apply(x):
        weights = model.trainable_variables
        optimizer.apply([w.value * 0 + 1 for w in weights], weights)
        return x

    with pytest.raises(
        js.errors.LeakedTracerError, match=r"model: .*moving_mean(.|\n)*state"
    ):
        two.run(call, (x,))
    with pytest.raises(js.errors.LeakedTracerError, match="stateless_apply"):
        two.run(apply, (x,))
    with pytest.raises(js.errors.LeakedTracerError, match="`m: "):
        two.run(lambda m, x: m(x, training=True), (model, x))
    after = [np.asarray(v.value) for v in (*model.variables, *optimizer.variables)]
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)
