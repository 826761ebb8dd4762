"""A Flax transformer in a pipeline of stages trains as its blocks in a row do."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

STEPS, LAYERS, WIDTH, WORDS, LENGTH, BATCH = 10, 8, 8, 12, 4, 32
IDS = np.random.default_rng(0).integers(0, WORDS, (STEPS, BATCH, LENGTH + 1))


class Block(nn.Module):
    @nn.compact
    def __call__(self, h):
        a = nn.LayerNorm()(h)
        h = h + nn.MultiHeadDotProductAttention(2)(a, a)
        return h + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(h))))


def block(params, h):
    return Block().apply({"params": params}, h)


def initial(key):
    def one(key):
        return Block().init(key, jnp.zeros((1, LENGTH, WIDTH)))["params"]

    embedding = jax.random.normal(key, (WORDS, WIDTH)) / 3
    return {"embedding": embedding, "blocks": jax.vmap(one)(jax.random.split(key, 8))}


def in_a_row(blocks, h):
    for i in range(LAYERS):
        h = block(jax.tree.map(lambda a, i=i: a[i], blocks), h)
    return h


def in_a_pipeline(blocks, h):
    return js.training.pipeline(jax.checkpoint(block), blocks, h, microbatches=4)


def loss(params, ids, through):
    h = through(params["blocks"], params["embedding"][ids[:, :-1]])
    logits = h @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


# Of what is zero but for rounding (the bias of keys), Adam would make a step as large
# as any, without an `eps` that is larger than that.
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, eps=1e-4))


def update(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def trained(tx, params, gradient):
    state, losses, change = tx.init(params), [], jax.jit(update, static_argnums=0)
    for ids in IDS:
        value, grads = gradient(params, ids)
        params, state = change(tx, params, state, grads)
        losses.append(value)
    return losses, params


def placed(strategy, tree):
    def lies(path, array):
        is_block = "blocks" in jax.tree_util.keystr(path)
        spec = P("stage") if is_block else P()
        return jax.device_put(array, NamedSharding(strategy.mesh, spec))

    return jax.tree.map_with_path(lies, tree)


@pytest.mark.slow
def test_ten_steps_equal_those_of_one_device():
    stages, tx = 4, ADAMW
    start = jax.jit(initial)(jax.random.key(0))
    gradient = jax.jit(jax.value_and_grad(lambda p, i: loss(p, i, in_a_row)))
    wanted_losses, wanted = trained(tx, start, gradient)
    strategy = js.MirroredStrategy(logical_axes={"stage": stages})

    def step(params, state, ids):
        found = jax.value_and_grad(lambda p: loss(p, ids, in_a_pipeline))(params)
        value, grads = js.get_replica_context().all_reduce("mean", found)
        return *update(tx, params, state, grads), value

    params, state = placed(strategy, (start, tx.init(start)))
    losses = []
    for ids in IDS:
        blocks = strategy.per_replica([*ids.reshape(8 // stages, -1, LENGTH + 1)])
        params, state, value = strategy.run(step, (params, state, blocks))
        losses.append(value)
    np.testing.assert_allclose(losses, wanted_losses, atol=1e-5)
    same = zip(*map(jax.tree.leaves, (params, wanted)), strict=True)
    for found, alone in same:
        np.testing.assert_allclose(found, alone, atol=1e-5)
    for array in jax.tree.leaves(params["blocks"]):
        assert array.sharding.shard_shape(array.shape)[0] == LAYERS // stages
