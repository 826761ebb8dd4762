"""A program of TensorFlow, with the lines that README.md says, on 8 replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxstrategy as js

js.simulate(8)
strategy = js.MirroredStrategy()
GLOBAL_BATCH_SIZE = 16


def wave(*shape, shift):
    return 0.3 * np.sin(0.7 * np.arange(np.prod(shape)) + shift).reshape(shape)


def rows(k):
    x = np.cos(0.37 * (6 * np.arange(16)[:, None] + np.arange(6) + 13 * k))
    y = np.floor(np.abs(3 * x.astype(np.float32).sum(1))) % 3
    return x.astype(np.float32), y.astype(np.int32)


dataset = strategy.experimental_distribute_dataset([rows(k) for k in range(20)])
optimizer = optax.sgd(0.5)
with strategy.scope():
    model = {
        "w1": jnp.float32(wave(6, 10, shift=1)),
        "b1": jnp.zeros(10),
        "w2": jnp.float32(wave(10, 3, shift=2)),
        "b2": jnp.zeros(3),
    }
    slots = optimizer.init(model)


def train_step(model, slots, inputs):
    x, y = inputs

    def loss_fn(model):
        hidden = jax.nn.relu(x @ model["w1"] + model["b1"])
        logits = hidden @ model["w2"] + model["b2"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return js.training.compute_average_loss(
            losses, global_batch_size=GLOBAL_BATCH_SIZE
        )

    loss, grads = jax.value_and_grad(loss_fn)(model)
    grads = js.get_replica_context().all_reduce("sum", grads)
    updates, slots = optimizer.update(grads, slots, model)
    return optax.apply_updates(model, updates), slots, loss


for x in dataset:
    model, slots, losses = strategy.run(train_step, args=(model, slots, x))
    print(float(strategy.reduce(js.ReduceOp.SUM, losses, axis=None)))
