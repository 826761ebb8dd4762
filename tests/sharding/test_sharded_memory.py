"""The memory of steps over layers, and where they gather them, as XLA tells of both."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.divided import assert_alike, drawn, sharded, whole
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js

LAYERS, WIDTH = 8, 128
OPTIMIZER = optax.adamw(1e-3)


def start():
    layers = {
        "up": drawn(LAYERS, WIDTH, 2 * WIDTH) / 16,
        "down": drawn(LAYERS, 2 * WIDTH, WIDTH, seed=1) / 16,
    }
    return layers, jax.jit(OPTIMIZER.init)(layers)


def training(remat):
    def layer(x, weights):
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    body = jax.checkpoint(layer) if remat else layer

    def step(state, x):
        layers, memory = state
        loss = lambda layers: (lax.scan(body, x, layers)[0] ** 2).mean()  # noqa: E731
        grads = replica().all_reduce("mean", jax.grad(loss)(layers))
        updates, memory = OPTIMIZER.update(grads, memory, layers)
        return optax.apply_updates(layers, updates), memory

    return step


def trained(strategy, remat):
    """The state after two donated steps, and what is told of the program."""
    step, state = training(remat), strategy.mirror(start())
    x = strategy.per_replica(
        list(drawn(strategy.num_replicas_in_sync, 4, WIDTH, seed=2))
    )
    options = js.RunOptions(donate_argnums=0)
    for _ in range(2):
        state = strategy.run(step, (state, x), options=options)
    found = strategy.explain(step, (state, x), options=options)
    return jax.tree.map(np.asarray, state), found.memory, found.compiled_collectives


@pytest.mark.slow
def test_layers_are_gathered_one_by_one_with_remat():
    state, memory, exchanged = trained(sharded(), True)
    want, other, _ = trained(whole(), True)
    assert_alike(state, want)
    assert memory.peak <= 0.25 * other.peak
    assert memory.temporary <= 0.25 * other.temporary
    per_layer = {(each.kind, each.times) for each in exchanged}
    assert per_layer == {("all_gather", LAYERS), ("reduce_scatter", LAYERS)}


@pytest.mark.slow
def test_what_is_gathered_is_not_kept_without_remat():
    state, memory, _ = trained(sharded(), False)
    want, other, _ = trained(whole(), False)
    assert_alike(state, want)
    assert memory.temporary <= 0.4 * other.temporary
    assert memory.peak <= 0.25 * other.peak
