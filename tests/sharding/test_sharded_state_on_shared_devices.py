"""State divided over the devices of replicas that share them: whole state's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.replicas import ids, replica
from jax import lax

import jaxstrategy as js


@pytest.fixture(scope="module")
def divided():
    """8 replicas on 2 devices, of which each has one half of the state."""
    return js.MirroredStrategy(
        jax.devices()[:2],
        sharding=js.StateSharding("state", min_bytes=0),
        replicas_per_device=4,
    )


def shard_shapes(tree):
    return [x.addressable_shards[0].data.shape for x in jax.tree.leaves(tree)]


def trained(strategy, loss, params, batch, tx, steps=3):
    """Parameters after some steps, and those of one device with the whole batch."""

    @strategy.step
    def step(params, state, batch):
        grads = replica().all_reduce("mean", jax.grad(loss)(params, batch))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def alone(params, state):
        grads = jax.grad(
            lambda params: jnp.mean(
                jnp.stack([loss(params, batch[i]) for i in range(len(batch))])
            )
        )(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    both = strategy.mirror((params, tx.init(params)))
    one = params, tx.init(params)
    for _ in range(steps):
        both = step(*both, js.PerReplica(batch))
        one = jax.jit(alone)(*one)
    strategy.assert_in_sync(both)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), both, one
    )
    return both


@pytest.mark.slow
def test_an_optimizer(divided):
    rng = np.random.default_rng(0)
    params = {
        "kernel": rng.normal(size=(6, 8)).astype(np.float32),
        "bias": np.zeros(3, np.float32),
    }

    def loss(params, x):
        hidden = jnp.tanh(x @ params["kernel"])
        return ((hidden[:, :3] + params["bias"][None]) ** 2).mean()

    batch = rng.normal(size=(8, 2, 6)).astype(np.float32)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))
    params, state = trained(divided, loss, params, batch, tx)
    (moments,) = [x for x in jax.tree.leaves(state, is_leaf=_has_mu) if _has_mu(x)]
    assert shard_shapes(moments.mu["kernel"]) == [(6, 4)]
    assert shard_shapes(params["kernel"]) == [(6, 4)]
    assert shard_shapes(params["bias"]) == [(3,)]


def _has_mu(node):
    return hasattr(node, "mu")


@pytest.mark.slow
def test_layers_in_a_loop(divided):
    rng = np.random.default_rng(1)
    layers = rng.normal(size=(3, 4, 4)).astype(np.float32)

    def layer(x, w):
        return jnp.tanh(x @ w), None

    def loss(layers, x):
        return (lax.scan(jax.checkpoint(layer), x, layers)[0] ** 2).mean()

    batch = rng.normal(size=(8, 2, 4)).astype(np.float32)
    trained(divided, loss, layers, batch, optax.adam(0.05))


def test_one_device_has_all(divided):
    alone = js.MirroredStrategy(
        jax.devices()[:1],
        sharding=divided._replicas.state_sharding,
        replicas_per_device=8,
    )
    w = alone.mirror(np.ones(16, np.float32))

    def step(w, x):
        return w - replica().all_reduce("mean", x)

    np.testing.assert_array_equal(alone.run(step, (w, ids(alone))), np.full(16, -2.5))
    assert "share one device" in str(alone.explain(step, (w, ids(alone))))


def test_sums_are_scattered(divided):
    w = divided.mirror(np.ones((64, 8), np.float32))

    def step(w, x):
        grads = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
        return w - replica().all_reduce("mean", grads)

    given = w, js.PerReplica(np.ones((8, 2, 64), np.float32))
    program = jax.jit(lambda *given: divided.run(step, given)).lower(*given).compile()
    text = program.as_text()
    assert "reduce-scatter" in text and "all-gather" in text
    assert not [line for line in text.splitlines() if "all-reduce(" in line]
