"""A Flax training loop, as a user with a strict checker writes it.

Flax, Optax and JAX leave types unknown; each `ignore` below is for one of theirs.
"""

from __future__ import annotations

import jax
import numpy as np
import optax  # type: ignore # pyright: ignore
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxstrategy as js

strategy = js.MirroredStrategy(js.simulate(8))
images = np.zeros((64, 8, 8, 1), np.float32)
labels = np.zeros((64,), np.int32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(10)(x.reshape((len(x), -1)))


model = Net()


def build(key: jax.Array) -> TrainState:
    params = model.init(key, images[:1])  # pyright: ignore
    create = TrainState.create  # pyright: ignore
    apply, tx = model.apply, optax.adam(1e-3)  # pyright: ignore
    made = create(apply_fn=apply, params=params, tx=tx)  # type: ignore
    assert isinstance(made, TrainState)
    return made


@strategy.run
def step(
    state: TrainState, images: jax.Array, labels: jax.Array
) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: object) -> jax.Array:
        logits: jax.Array = state.apply_fn(params, images)  # pyright: ignore
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        losses = cross_entropy(logits, labels)  # pyright: ignore
        return js.masked_mean(losses)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)  # pyright: ignore
    loss, grads = js.get_replica_context().all_reduce("mean", (loss, grads))
    return state.apply_gradients(grads=grads), loss  # type: ignore # pyright: ignore


def main() -> None:
    state = strategy.init(build, jax.random.key(0))
    batches = [(images, labels)] * 3
    for x, y in strategy.experimental_distribute_dataset(batches):
        state, loss = step(state, x, y)
        print(float(loss))


if __name__ == "__main__":
    main()
