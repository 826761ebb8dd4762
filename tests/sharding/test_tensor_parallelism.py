"""A block of a transformer whose heads and layers each replica's devices divide."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxstrategy as js

WORDS, WIDTH, HEADS, LENGTH, ROWS = 32, 16, 8, 8, 16
INIT = nn.initializers.lecun_normal()
ZEROS = nn.initializers.zeros


def over(*names, init=INIT):
    return nn.with_partitioning(init, names)


class Block(nn.Module):
    """Attention, then two layers. Flax's attention names the axes of a matrix."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(
            HEADS,
            use_bias=False,
            kernel_init=over(None, "core"),
            out_kernel_init=over("core"),
        )(nn.LayerNorm()(x), mask=nn.make_causal_mask(jnp.ones(x.shape[:2])))
        columns, bias = over(None, "core"), over("core", init=ZEROS)
        y = nn.Dense(4 * WIDTH, kernel_init=columns, bias_init=bias)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH, kernel_init=over("core", None))(nn.gelu(y))


class Transformer(nn.Module):
    """Predicts the next word."""

    @nn.compact
    def __call__(self, words):
        x = nn.Embed(WORDS, WIDTH)(words)
        return nn.Dense(WORDS, use_bias=False)(nn.LayerNorm()(Block()(x)))


def texts(steps):
    shape = (steps, ROWS, LENGTH + 1)
    return np.random.default_rng(0).integers(0, WORDS, shape)


def loss_of(predict, words):
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(predict(words[:, :-1]), words[:, 1:]).mean()


def build(key):
    model = Transformer()
    params = model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(3e-3))


def loss_and_gradients(state, words):
    def loss(params):
        return loss_of(lambda x: state.apply_fn({"params": params}, x), words)

    return jax.value_and_grad(loss)(state.params)


def step(state, words):
    found = loss_and_gradients(state, words)
    loss, gradients = js.get_replica_context().all_reduce("mean", found)
    return state.apply_gradients(grads=gradients), loss


def test_training_is_that_of_one_device_and_keeps_its_places():
    strategy = js.MirroredStrategy(logical_axes={"core": 2})
    state, losses = strategy.init(build, jax.random.key(0)), []
    wanted, wanted_losses = jax.jit(build)(jax.random.key(0)), []

    @jax.jit
    def whole(state, words):
        loss, gradients = loss_and_gradients(state, words)
        return state.apply_gradients(grads=gradients), loss

    for words in texts(3):
        parts = strategy.per_replica(words.reshape(4, ROWS // 4, -1))
        state, loss = strategy.run(step, args=(state, parts))
        losses.append(float(loss))
        wanted, loss = whole(wanted, words)
        wanted_losses.append(float(loss))
    np.testing.assert_allclose(losses, wanted_losses, rtol=0, atol=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    for tree in (state.params, state.opt_state[0].mu):
        kernel = tree["Block_0"]["Dense_0"]["kernel"]
        assert isinstance(kernel, nn.Partitioned) and kernel.names == (None, "core")
        assert tuple(kernel.value.sharding.spec) == (None, "core")


@pytest.mark.slow
def test_a_block_costs_two_reductions_inside_a_replica_and_no_gather():
    strategy = js.MirroredStrategy(logical_axes={"core": 2})
    x = strategy.per_replica(np.ones((4, 2, LENGTH, WIDTH), np.float32))
    params = strategy.init(Block().init, jax.random.key(0), x.local(0))

    def forward(params, x):
        return Block().apply(params, x)

    program = jax.jit(lambda params, x: strategy.run(forward, (params, x)))
    text = program.lower(params, x).compile().as_text()
    # Shoeybi et al., 2019 (arXiv:1909.08053), figure 3: one after the attention, one
    # after the second layer.
    reductions = re.findall(r"= \S+ all-reduce(?:-start)?\((?:.*)", text)
    assert len(reductions) == 2, text
    assert all("[4,2]<=[8]" in r or "{{0,1},{2,3}" in r for r in reductions)
    assert "all-gather" not in text and "all-to-all" not in text
    assert "collective-permute" not in text
