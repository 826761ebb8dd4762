"""A model of Flax, trained with Optax on four replicas."""

import jax
import numpy as np
import optax
from flax import linen as nn, nnx

import jaxstrategy as js

strategy = js.MirroredStrategy(js.simulate(4))
model = nn.Sequential(
    [nn.Dense(8), js.flax.linen.BatchNorm(use_running_average=False), nn.Dense(1)]
)
tx = optax.chain(js.optax.all_reduce_gradients(), optax.sgd(0.01))
x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)


def build(key):
    variables = model.init(key, x)
    return variables, tx.init(variables["params"])


@strategy.run
def step(variables, slots, x):
    def loss_fn(params):
        y, new = model.apply(variables | {"params": params}, x, mutable=["batch_stats"])
        return ((y.squeeze() - x.sum(1)) ** 2).mean(), new

    params = variables["params"]
    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, slots = tx.update(grads, slots, params)
    params = optax.apply_updates(params, updates)
    loss = js.get_replica_context().all_reduce("mean", loss)
    return {"params": params, **new}, slots, loss


variables, slots = strategy.init(build, jax.random.key(0))
losses = []
for batch in strategy.experimental_distribute_dataset([x] * 20):
    variables, slots, loss = step(variables, slots, batch)
    losses.append(float(loss))
assert losses[-1] < losses[0] / 2, losses

module = nnx.Linear(4, 1, rngs=nnx.Rngs(0))


@strategy.run
def forward(module, x):
    return js.get_replica_context().all_reduce("mean", module(x).mean())


assert np.isfinite(float(forward(module, strategy.per_replica([x] * 4))))
