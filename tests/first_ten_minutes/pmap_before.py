"""Training with pmap as in Flax's examples: copies, shards, statistics averaged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

jax.config.update("jax_num_cpu_devices", 8)
images, labels = load_digits(return_X_y=True)
images, labels = np.float32(images / 16), np.int32(labels)
batches = [
    {"image": images[i : i + 64], "label": labels[i : i + 64]}
    for i in range(0, 640, 64)
]


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(32, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x)


class State(TrainState):
    batch_stats: dict


@functools.partial(jax.pmap, axis_name="batch")
def train_step(state, batch):
    def loss_fn(params):
        logits, new = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), new

    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, grads = jax.lax.pmean((loss, grads), axis_name="batch")
    return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), loss


@functools.partial(jax.pmap, axis_name="batch")
def synchronized(state):
    return state.replace(batch_stats=jax.lax.pmean(state.batch_stats, "batch"))


variables = Network().init(jax.random.key(0), jnp.ones((1, 64)))
state = State.create(apply_fn=Network().apply, tx=optax.adam(1e-2), **variables)
state = jax_utils.replicate(state)
for batch in batches:
    batch = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
    state, loss = train_step(state, batch)
    print(float(loss[0]))

state = jax_utils.unreplicate(synchronized(state))
variables = {"params": state.params, "batch_stats": state.batch_stats}
guess = Network().apply(variables, images[640:], train=False)
print(float((guess.argmax(-1) == labels[640:]).mean()))
