"""A constraint means the same whichever way it is written, with divided state too."""

import jax
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

STATE = js.StateSharding("state", min_bytes=0)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


CONSTRAINTS = {
    "on the mesh": lambda strategy, x: lax.with_sharding_constraint(
        x, NamedSharding(strategy.mesh, P(None, "core"))
    ),
    "by parts": lambda strategy, x: strategy.experimental_split_to_logical_devices(
        x, [1, 2]
    ),
}


@pytest.mark.slow
@each_of("way", CONSTRAINTS)
def test_training_with_a_constraint_is_that_of_one_device(way):
    strategy = js.TPUStrategy(cores_per_replica=2, sharding=STATE)
    constrain, tx = CONSTRAINTS[way], optax.adam(1e-2)
    w0, x = numbers(16, 8), numbers(4, 4, 16, seed=1)

    def loss(w, x):
        return ((constrain(strategy, x) @ w) ** 2).mean()

    @strategy.run
    def step(state, x):
        w, moments = state
        context = js.get_replica_context()
        gradient = context.all_reduce("mean", jax.grad(loss)(w, x))
        updates, moments = tx.update(gradient, moments, w)
        return optax.apply_updates(w, updates), moments

    state = strategy.mirror((w0, tx.init(w0)))
    w, moments = w0, tx.init(w0)
    for _ in range(3):
        state = step(state, strategy.per_replica(x))
        y = x.reshape(16, 16)
        updates, moments = tx.update(2 / 128 * y.T @ (y @ w), moments, w)
        w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(state[0], w, rtol=1e-4, atol=1e-6)
    assert state[0].sharding.shard_shape(w.shape) == (4, 8)
