"""Training on 8 replicas is training on one device."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
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


class Transformer(nnx.Module):
    """One block, which tells whether a sequence begins as it ends."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(8, 16, rngs=rngs)
        # The bias of a key has no gradient, and Adam takes steps of the rounding.
        self.attention = nnx.MultiHeadAttention(
            2, 16, use_bias=False, decode=False, rngs=rngs
        )
        self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs) for _ in range(2)])
        self.dense = nnx.List([nnx.Linear(16, n, rngs=rngs) for n in (32, 2)])
        self.out = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, tokens):
        h = self.embed(tokens)
        h = h + self.attention(self.norms[0](h))
        h = h + self.out(nnx.gelu(self.dense[0](self.norms[1](h))))
        return self.dense[1](h.mean(1))


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_may_differ")
def test_nnx_transformer_with_adam(eight):
    tokens = np.random.default_rng(0).integers(0, 8, (5, ROWS, 6))
    labels = (tokens[..., 0] == tokens[..., -1]).astype(np.int32)

    def loss_fn(model, x, y):
        return cross_entropy(model(x), y).mean()

    def trained(decorate, mean, batch_of):
        model = Transformer()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @decorate
        def step(model, optimizer, x, y):
            loss, grads = mean(nnx.value_and_grad(loss_fn)(model, x, y))
            optimizer.update(model, grads)
            return loss

        batches = zip(tokens, labels, strict=True)
        losses = [step(model, optimizer, *batch_of(*batch)) for batch in batches]
        return losses, nnx.state(model), nnx.state(optimizer)

    want = trained(nnx.jit, lambda tree: tree, lambda *batch: batch)
    have = trained(
        eight.run,
        lambda tree: js.get_replica_context().all_reduce("mean", tree),
        lambda *batch: distributed(eight, *batch),
    )
    assert_equal(have, want, 1e-4)
