"""Transformers whose heads and layers are divided over the devices of each replica.

The oracle is one device that takes each whole batch. Layouts are written
`replicas x devices of each`.
"""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxstrategy as js

WORDS, WIDTH, HEADS, LENGTH, ROWS = 32, 16, 8, 8, 16
INIT = nn.initializers.lecun_normal()
ZEROS = nn.initializers.zeros

LAYOUTS = {
    "8x1": {},
    "4x2": {"logical_axes": {"core": 2}},
    "2x4": {"logical_axes": {"core": 4}},
    "1x8": {"logical_axes": {"core": 8}},
    "4 devices of 2 replicas": {
        "devices": ["CPU:0", "CPU:1", "CPU:2", "CPU:3"],
        "replicas_per_device": 2,
    },
    "1 device of 8 replicas": {"devices": ["CPU:0"], "replicas_per_device": 8},
}


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

    blocks: int = 1

    @nn.compact
    def __call__(self, words):
        x = nn.Embed(WORDS, WIDTH)(words)
        for _ in range(self.blocks):
            x = Block()(x)
        return nn.Dense(WORDS, use_bias=False)(nn.LayerNorm()(x))


def texts(steps):
    shape = (steps, ROWS, LENGTH + 1)
    return np.random.default_rng(0).integers(0, WORDS, shape)


def loss_of(predict, words):
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(predict(words[:, :-1]), words[:, 1:]).mean()


def build(key, blocks):
    model = Transformer(blocks)
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


def parts(strategy, words):
    count = strategy.num_replicas_in_sync
    return strategy.per_replica(words.reshape(count, ROWS // count, -1))


def trained(strategy, steps, blocks):
    state = strategy.init(build, jax.random.key(0), blocks)
    losses = []
    for words in texts(steps):
        state, loss = strategy.run(step, args=(state, parts(strategy, words)))
        losses.append(loss)
    return state, np.array(losses)


_expected = {}


def trained_on_one_device(steps, blocks):
    @jax.jit
    def whole(state, words):
        loss, gradients = loss_and_gradients(state, words)
        return state.apply_gradients(grads=gradients), loss

    if (steps, blocks) not in _expected:
        state, losses = build(jax.random.key(0), blocks), []
        for words in texts(steps):
            state, loss = whole(state, words)
            losses.append(loss)
        _expected[steps, blocks] = state, np.array(losses)
    return _expected[steps, blocks]


def assert_trains_alike(layout, steps, blocks, tolerance):
    strategy = js.MirroredStrategy(**LAYOUTS[layout])
    state, losses = trained(strategy, steps, blocks)
    wanted, wanted_losses = trained_on_one_device(steps, blocks)
    np.testing.assert_allclose(losses, wanted_losses, rtol=0, atol=tolerance)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
    return state


def spec(array):
    return tuple(array.sharding.spec)


@pytest.mark.slow
def test_a_state_stays_boxed_and_placed_and_right():
    state = assert_trains_alike("4x2", steps=2, blocks=1, tolerance=1e-6)
    for tree in (state.params, state.opt_state[0].mu):
        kernel = tree["Block_0"]["Dense_0"]["kernel"]
        assert isinstance(kernel, nn.Partitioned) and kernel.names == (None, "core")
        assert spec(kernel.value) == (None, "core")
        attention = tree["Block_0"]["MultiHeadDotProductAttention_0"]
        assert spec(attention["query"]["kernel"].value)[:2] == (None, "core")
        assert spec(attention["out"]["kernel"].value)[:1] == ("core",)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_are_those_of_one_device(layout):
    assert_trains_alike(layout, steps=20, blocks=2, tolerance=1e-5)


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


class Objects(nnx.Module):
    """One block, of NNX."""

    def __init__(self, rngs):
        def on(*names, init=INIT):
            return nnx.with_partitioning(init, names)

        self.words = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            use_bias=False,
            decode=False,
            kernel_init=on(None, "core", None),
            out_kernel_init=on("core", None, None),
            rngs=rngs,
        )
        columns, bias = on(None, "core"), on("core", init=ZEROS)
        self.up = nnx.Linear(
            WIDTH, 4 * WIDTH, kernel_init=columns, bias_init=bias, rngs=rngs
        )
        self.down = nnx.Linear(
            4 * WIDTH, WIDTH, kernel_init=on("core", None), rngs=rngs
        )
        self.last = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)

    def __call__(self, words):
        x = self.words(words)
        x = x + self.attention(x, mask=nnx.make_causal_mask(words))
        return self.last(x + self.down(nnx.gelu(self.up(x))))


def build_objects():
    model = Objects(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


def objects_step(model, optimizer, words):
    found = nnx.value_and_grad(loss_of)(model, words)
    loss, gradients = js.get_replica_context().all_reduce("mean", found)
    optimizer.update(model, gradients)
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["4x2", "1x8", "4 devices of 2 replicas"])
def test_objects_of_nnx_train_alike(layout):
    strategy = js.MirroredStrategy(**LAYOUTS[layout])
    model, optimizer = strategy.init(build_objects)
    with nnx.use_eager_sharding(False):
        one, its_optimizer = build_objects()

    @nnx.jit
    def whole(model, optimizer, words):
        loss, gradients = nnx.value_and_grad(loss_of)(model, words)
        optimizer.update(model, gradients)
        return loss

    for words in texts(20):
        args = (model, optimizer, parts(strategy, words))
        loss = strategy.run(objects_step, args=args)
        wanted = whole(one, its_optimizer, words)
        np.testing.assert_allclose(loss, wanted, rtol=0, atol=1e-5)
    if "logical_axes" in LAYOUTS[layout]:
        assert spec(model.up.kernel[...]) == (None, "core")
        assert spec(model.attention.query.kernel[...])[:2] == (None, "core")
        assert spec(optimizer.opt_state[0].nu.down.kernel[...])[:1] == ("core",)
