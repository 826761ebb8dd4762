"""The steps of the demo, and the state that they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

import jaxstrategy as js
from jaxstrategy.demo._command_line import Arguments
from jaxstrategy.values._types import PyTree

if TYPE_CHECKING:
    from flax.training.train_state import TrainState


def training_step(
    strategy: js.Strategy,
) -> Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, jax.Array]]:
    """One step of gradient descent on all replicas: `step(state, images, labels)`.

    Returns the new state and the mean loss of the global batch.
    """
    import optax

    # A gradient that was left unreduced would be an error, not another network on each
    # replica.
    @strategy.run(options=js.RunOptions(donate_argnums=0, expect_mirrored=True))
    def step(
        state: TrainState, images: jax.Array, labels: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: PyTree) -> jax.Array:
            logits = state.apply_fn(params, images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        loss, grads = js.get_replica_context().all_reduce("mean", (loss, grads))
        return state.apply_gradients(grads=grads), loss

    return step


def counting_step(
    strategy: js.Strategy,
) -> Callable[[TrainState, jax.Array, jax.Array], jax.Array]:
    """How many images are recognised: `count(state, images, labels)`."""

    @strategy.run
    def count(state: TrainState, images: jax.Array, labels: jax.Array) -> jax.Array:
        hits = state.apply_fn(state.params, images).argmax(axis=-1) == labels
        return js.get_replica_context().all_reduce("sum", hits.sum())

    return count


def initial_state(strategy: js.Strategy, options: Arguments) -> TrainState:
    """The untrained network and its optimizer, mirrored on all replicas."""
    import optax
    from flax import linen as nn
    from flax.training.train_state import TrainState

    def flatten(x: jax.Array) -> jax.Array:
        return x.reshape(len(x), -1)

    # All smooth: with max-pooling and ReLU, rounding may let another pixel win, and the
    # losses of 8 replicas and of 1 then differed by up to 1e-2 (for 4 seeds of 20).
    first, second = nn.Conv(32, (3, 3)), nn.Conv(64, (3, 3), strides=2)
    model = nn.Sequential([first, nn.gelu, second, nn.gelu, flatten, nn.Dense(10)])
    rate = optax.cosine_decay_schedule(options.learning_rate, options.steps)
    optimizer = optax.adam(rate)

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 8, 8, 1)))
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    return strategy.init(create, jax.random.key(options.seed))
