"""Training on 8 replicas is training on one device."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen
from flax.training import train_state

import jaxstrategy as js

STEPS, ROWS, REPLICAS = 20, 16, 8


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
