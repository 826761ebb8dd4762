"""Trains on the handwritten digits, and tests, as one process or as several."""

import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxstrategy as js

ROWS = 256


@functools.cache
def digits():
    # Read without scikit-learn, whose import takes longer than the training.
    folder = pathlib.Path(importlib.util.find_spec("sklearn").origin).parent
    file = folder / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    pixels, labels = rows[:, :-1], rows[:, -1].astype(int)
    order = np.random.default_rng(0).permutation(len(labels))
    return {"x": pixels[order].astype(np.float32) / 16, "y": labels[order]}


def create():
    key = jax.random.key(0)
    return {"w1": 0.1 * jax.random.normal(key, (64, 32)), "w2": jnp.zeros((32, 10))}


def logits(params, x):
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def programs(strategy):
    """A step of training, and one that counts what is recognised."""

    @strategy.run
    def step(params, batch):
        def loss(params):
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits(params, batch["x"]), batch["y"]
            )
            return js.masked_sum(losses) / ROWS

        value, grads = jax.value_and_grad(loss)(params)
        value, grads = js.get_replica_context().all_reduce("sum", (value, grads))
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

    @strategy.run
    def count(params, batch):
        right = logits(params, batch["x"]).argmax(-1) == batch["y"]
        found = {"right": js.masked_sum(right), "all": js.masked_sum(right | True)}
        return js.get_replica_context().all_reduce("sum", found)

    return step, count


def train(strategy, steps, epochs=4):
    """The loss of each step, and what was recognised of how many."""
    step, count = programs(strategy)
    params = strategy.init(create)
    train = js.batches(digits(), ROWS, shuffle=3, epochs=epochs)
    losses = []
    for batch in strategy.experimental_distribute_dataset(train):
        params, loss = step(params, batch)
        losses.append(float(loss))
        if len(losses) == steps:
            break
    found = {"right": 0, "all": 0}
    test = js.batches(digits(), ROWS)
    for batch in strategy.experimental_distribute_dataset(test):
        found = jax.tree.map(lambda a, b: a + int(b), found, count(params, batch))
    strategy.assert_in_sync(params)
    return losses, found


def main():
    print("found", json.dumps(train(js.MultiWorkerMirroredStrategy(), steps=20)))
