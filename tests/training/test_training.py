"""Twenty steps on 8 replicas are twenty steps on one device.

The oracle is plain JAX, Flax and Optax, jitted on one device with the whole batch; and
curves recorded from TensorFlow.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen
from flax.training import train_state
from helpers.oracle import recorded

import jaxstrategy as js

STEPS, ROWS, REPLICAS = 20, 16, 8
CURVES = recorded("mlp_sgd.json")


@pytest.fixture(scope="module")
def eight():
    return js.MirroredStrategy(jax.devices())


def images(seed=0):
    """`[step, row, ...]` images and labels."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(STEPS, ROWS, 6, 6, 1)).astype(np.float32)
    return x, (x.mean((2, 3, 4)) > 0).astype(np.int32)


def distributed(strategy, *arrays):
    """The rows of one step, divided."""
    return strategy.per_replica(
        tuple(a.reshape(REPLICAS, -1, *a.shape[1:]) for a in arrays)
    )


def assert_equal(have, want, tolerance=1e-5):
    """Float32 parameters after 20 steps."""

    def equal(have, want):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=0, atol=tolerance)

    have, want = jax.tree.map(np.asarray, (have, want))
    jax.tree.map(equal, have, want)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# A linen network with BatchNorm.


class Net(linen.Module):
    library: Any

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(4, (3, 3), use_bias=False)(x)
        x = self.library.BatchNorm(use_running_average=False, momentum=0.9)(x)
        x = linen.relu(x).mean((1, 2))
        return linen.Dense(2)(x)


class State(train_state.TrainState):
    batch_stats: Any


def created(net, tx):
    variables = net.init(jax.random.key(0), np.ones((2, 6, 6, 1), np.float32))
    return State.create(apply_fn=net.apply, tx=tx, **variables)


def loss_of(state, params, x, labels):
    variables = {"params": params, "batch_stats": state.batch_stats}
    logits, changed = state.apply_fn(variables, x, mutable=["batch_stats"])
    return cross_entropy(logits, labels), changed["batch_stats"]


def alone(tx):
    """The state after 20 steps of Flax's network on one device."""

    @jax.jit
    def step(state, x, labels):
        def loss_fn(params):
            losses, stats = loss_of(state, params, x, labels)
            return losses.mean(), stats

        grads, stats = jax.grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats)

    state = created(Net(linen), tx)
    for x, labels in zip(*images(), strict=True):
        state = step(state, x, labels)
    return state


def parts(state):
    return state.params, state.batch_stats


CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5, 0.9))


def test_linen_cnn_with_batchnorm(eight):
    tx = optax.chain(js.optax.all_reduce_gradients(), CLIPPED)

    @eight.run(options=js.RunOptions(donate_argnums=0, expect_mirrored=True))
    def step(state, x, labels):
        def loss_fn(params):
            losses, stats = loss_of(state, params, x, labels)
            return losses.mean(), stats

        grads, stats = jax.grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats)

    state = eight.init(created, Net(js.flax.linen), tx)
    for batch in zip(*images(), strict=True):
        state = step(state, *distributed(eight, *batch))
    assert_equal(parts(state), parts(alone(CLIPPED)))
    assert int(state.step) == STEPS


# TensorFlow's own run, with its way of scaling losses.


def test_the_curve_of_tensorflow(eight):
    (want,) = CURVES["runs"]
    tx = optax.chain(js.optax.all_reduce_gradients("sum"), optax.sgd(0.5))

    def wave(size, scale, shift):
        return 0.3 * np.sin(scale * np.arange(size) + shift).astype(np.float32)

    params = {
        "W1": wave(60, 0.7, 1).reshape(6, 10),
        "b1": np.zeros(10, np.float32),
        "W2": wave(30, 0.7, 2).reshape(10, 3),
        "b2": np.zeros(3, np.float32),
    }

    @eight.run(options=js.RunOptions(expect_mirrored=True))
    def step(params, state, x, y):
        def loss_fn(p):
            hidden = jax.nn.relu(x @ p["W1"] + p["b1"][None])
            losses = cross_entropy(hidden @ p["W2"] + p["b2"][None], y)
            return js.training.compute_average_loss(losses)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        loss = js.get_replica_context().all_reduce("sum", loss)
        return optax.apply_updates(params, updates), state, loss

    i, j = np.ogrid[:16, :6]
    losses, state = [], tx.init(params)
    for k in range(20):
        x = np.cos(0.37 * (6 * i + j + 13 * k)).astype(np.float32)
        y = (np.floor(np.abs(3 * x.sum(1))) % 3).astype(np.int32)
        params, state, loss = step(params, state, *distributed(eight, x, y))
        losses.append(loss)
    np.testing.assert_allclose(js.to_host(losses), want["losses"], atol=2e-5)
    np.testing.assert_allclose(params["W1"].sum(), want["final_w1_sum"], atol=1e-4)
    np.testing.assert_allclose(params["b2"], want["final_b2"], atol=1e-5)
