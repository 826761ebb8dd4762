"""A model of Keras, fitted on four replicas."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np

import jaxstrategy as js

strategy = js.MirroredStrategy(js.simulate(4))
x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
history = model.fit(x, x.sum(1), batch_size=16, epochs=20, verbose=0)
losses = history.history["loss"]
assert losses[-1] < losses[0] / 10, losses
