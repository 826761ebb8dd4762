"""Optimizers of Optax, unchanged, under `StateSharding`.

The oracle is whole state on the same replicas.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.cases import each_of
from helpers.divided import assert_alike, bytes_of, drawn, sharded, whole
from helpers.replicas import replica

import jaxstrategy as js

contrib = optax.contrib
ROWS, WIDTH, HIDDEN = 32, 16, 64
BATCHES = drawn(3, ROWS, WIDTH + 1, seed=3)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2),
    "clipped adamw": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.01)
    ),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "muon": contrib.muon(1e-2),
}


def start():
    return {"kernel": drawn(WIDTH, HIDDEN) / 4, "bias": drawn(HIDDEN, seed=1) / 4}


def loss_of(params, rows):
    x, y = rows[:, :-1], rows[:, -1:]
    hidden = jnp.tanh(x @ params["kernel"] + params["bias"][None])
    return ((hidden.mean(1, keepdims=True) - y) ** 2).mean()


def trained(optimizer, strategy, rows):
    """The parameters and the optimizer's memory after three steps."""

    def step(params, memory, rows):
        grads = jax.grad(loss_of)(params, rows)
        grads = replica().all_reduce("mean", grads)
        updates, memory = optimizer.update(grads, memory, params)
        return optax.apply_updates(params, updates), memory

    params = start()
    memory = jax.jit(optimizer.init)(params)
    for own in rows:
        own = own.reshape(strategy.num_replicas_in_sync, -1, WIDTH + 1)
        own = strategy.per_replica(list(own))
        params, memory = strategy.run(step, (params, memory, own))
    return params, memory


@pytest.mark.slow
@each_of("name", ["MultiSteps", "clipped adamw", "adafactor", "muon"])
def test_parameters_and_memory_are_those_of_whole_state(name):
    params, memory = trained(OPTIMIZERS[name], sharded(4), BATCHES)
    want = trained(OPTIMIZERS[name], whole(4), BATCHES)
    assert_alike((params, memory), want, 1e-6)
    assert isinstance(params["kernel"], js.Sharded)
    # All that has the size of a parameter is kept in parts; so are, here, the rows and
    # columns of a factored one.
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(memory))
    numbers = sum(leaf.nbytes for leaf in jax.tree.leaves(memory) if leaf.size < 4)
    assert bytes_of(memory) <= (total - numbers) / 4 + numbers


@pytest.mark.slow
def test_the_optimizers_memory_alone_is_divided(name="apply_if_finite"):
    params, memory = trained(OPTIMIZERS[name], sharded(4, "optimizer"), BATCHES)
    want = trained(OPTIMIZERS[name], whole(4), BATCHES)
    assert_alike((params, memory), want, 1e-6)
    assert isinstance(params["kernel"], js.Mirrored)
    large = [leaf for leaf in jax.tree.leaves(memory) if leaf.size >= HIDDEN]
    assert large and all(isinstance(leaf, js.Sharded) for leaf in large)


@pytest.mark.slow
@each_of(
    "name, shard", [("sgd", "optimizer"), ("adam", "state"), ("MultiSteps", "state")]
)
def test_what_is_computed_by_element_has_the_same_bits(name, shard):
    optimizer = OPTIMIZERS[name]

    def step(state, noise):
        w, memory = state
        grads = replica().all_reduce("mean", noise * w)
        updates, memory = optimizer.update(grads, memory, w)
        return optax.apply_updates(w, updates), memory

    def after(strategy):
        state = w, jax.jit(optimizer.init)(w)
        for _ in range(3):
            state = strategy.run(step, (state, strategy.per_replica(list(noise))))
        return state

    # So many that XLA computes parts with the same instructions as the whole.
    w, noise = drawn(4096), drawn(4, 4096, seed=1)
    assert_alike(after(sharded(4, shard)), after(whole(4)))
