"""A small model of Flax NNX, its training with Flax alone, and how models compare."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxstrategy as js

STEPS, ROWS, WIDTH = 5, 8, 4


class Net(nnx.Module):
    """A dense network that counts its calls."""

    def __init__(self, seed=0, rate=0.0):
        rngs = nnx.Rngs(seed)
        self.layers: Any = nnx.List(
            [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)]
        )
        self.norm: Any = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout: Any = nnx.Dropout(rate, rngs=rngs)
        self.calls: Any = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.dropout(self.norm(x))


def adam(model):
    return nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def rows(seed=0, n=ROWS):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, n, WIDTH)).astype(np.float32)
    return x, y


def squares(model, x, y):
    return ((model(x) - y) ** 2).mean(-1)


def loss_of(model, x, y):
    return squares(model, x, y).mean()


def mean(tree):
    return js.get_replica_context().all_reduce("mean", tree)


def train(model, optimizer, x, y):
    """One step on a replica's rows."""
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, mean(grads))
    return mean(loss)


def train_alone(model, optimizer, x, y):
    """The same step on all rows."""
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    return loss


@functools.cache
def trained_alone(steps=STEPS):
    """The parameters and losses of a training on one device."""
    model = Net()
    optimizer = adam(model)
    step = nnx.jit(train_alone)
    losses = [float(step(model, optimizer, *rows(i))) for i in range(steps)]
    return arrays(model), losses


def arrays(*objects):
    """All of them by name, on the host."""
    flat = nnx.to_flat_state(nnx.state(list(objects)))
    return {
        path: np.asarray(jax.random.key_data(v) if is_key(v) else v)
        for path, variable in flat
        for v in [variable.get_value()]
    }


def is_key(value):
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def assert_equal(have, want, tolerance=1e-5):
    assert have.keys() == want.keys()
    for path, array in have.items():
        assert array.dtype == want[path].dtype
        np.testing.assert_allclose(array, want[path], rtol=0, atol=tolerance)


def divided(strategy, *batch):
    """The rows of a batch, shared among the replicas."""
    n = strategy.num_replicas_in_sync
    split = [a.reshape(n, -1, *a.shape[1:]) for a in batch]
    return tuple(map(strategy.per_replica, split))


class Phases(nnx.Module):
    def __init__(self):
        self.dropout: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.seen = 0
        self.name = "new"

    def __call__(self, x):
        return self.dropout(x)
