"""A Keras model over rows that four devices cannot divide equally."""

import contextlib
import json
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

import jaxstrategy as js

ROWS = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
WANTED = ROWS.sum(1, keepdims=True)


def compiled():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    norm = layers.BatchNormalization()
    dense = layers.Dense(4, use_bias=False)
    model = keras.Sequential(
        [keras.Input((3,)), dense, norm, layers.Dropout(0.3), layers.Dense(1)]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


def fit(model):
    validation = ROWS[:7], WANTED[:7]
    return model.fit(
        ROWS, WANTED, batch_size=8, epochs=2, verbose=0, validation_data=validation
    ).history


def train(strategy):
    """What training, evaluation and prediction say; without strategy on one device."""
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = compiled()
    found = fit(model)
    found["score"] = model.evaluate(ROWS, WANTED, batch_size=8, verbose=0)
    found["predicted"] = model.predict(ROWS, batch_size=8, verbose=0).tolist()
    found["weights"] = [float(np.abs(w).sum()) for w in model.get_weights()]
    return found


def main():
    strategy = js.MultiWorkerMirroredStrategy()
    print("found", json.dumps(train(strategy)))
    with strategy.scope():
        model = compiled()
    np.random.seed(jax.process_index())
    try:
        fit(model)
    except ValueError as error:
        print("refused:", error)
