"""Steps with divided state in all that may be around them, and in what they use.

The oracle is whole state; what differs between ways of rounding is let pass.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.cases import each_of
from helpers.divided import SHARDS, assert_alike, drawn, lies, sharded, whole
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js

each_shard = each_of("shard", SHARDS)
ADAM = optax.adam(0.1)


def mean(tree):
    return replica().all_reduce("mean", tree)


def start():
    return {"w": drawn(16, 16) / 4, "b": drawn(16, seed=1)}


def rows_of(strategy):
    return strategy.per_replica(
        list(drawn(strategy.num_replicas_in_sync, 4, 16, seed=2))
    )


def loss_of(params, x):
    return (jnp.tanh(x @ params["w"] + params["b"][None]) ** 2).mean()


def train(state, x):
    params, memory = state
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    loss, grads = mean((loss, grads))
    updates, memory = ADAM.update(grads, memory, params)
    return (optax.apply_updates(params, updates), memory), loss


def assert_as_whole(do, tolerance=2e-6):
    """That `do(strategy)` gives the same on divided and on whole state."""
    assert_alike(do(sharded(4)), do(whole(4)), tolerance)


def donated(strategy):
    state = strategy.mirror((start(), ADAM.init(start())))
    for _ in range(3):
        before = state
        options = js.RunOptions(donate_argnums=0)
        state, _ = strategy.run(train, (state, rows_of(strategy)), options=options)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    return state


def scanned(strategy):
    x = rows_of(strategy)
    state = jax.tree.map(jnp.asarray, (start(), ADAM.init(start())))
    loop = lambda s: lax.scan(lambda s, _: strategy.run(train, (s, x)), s, length=3)  # noqa: E731
    return jax.jit(loop)(state)


def differentiated(strategy):
    def loss(params):
        state, loss = strategy.run(train, ((params, memory), rows_of(strategy)))
        return loss + sum(map(jnp.sum, jax.tree.leaves(state[0])))

    memory = ADAM.init(start())
    return jax.value_and_grad(loss)(strategy.mirror(start()))


def batched(strategy):
    two = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), start())

    def step(params, x):
        grads = mean(jax.grad(loss_of)(params, x))
        return jax.tree.map(lambda a, g: a - g, params, grads)

    return jax.vmap(lambda p: strategy.run(step, (p, rows_of(strategy))))(two)


@pytest.mark.slow
@each_of("around", [donated, scanned, differentiated, batched])
def test_all_that_may_be_around_a_call(around):
    assert_as_whole(around, 1e-5)


@pytest.mark.slow
def test_several_steps_in_one_call_are_those_of_as_many():
    strategy, given = sharded(4), (start(), ADAM.init(start()))
    state, losses = strategy.several(train)(given, [rows_of(strategy)] * 4)
    want, want_losses = given, []
    for _ in range(4):
        want, loss = strategy.run(train, (want, rows_of(strategy)))
        want_losses.append(loss)
    assert_alike(state, want, 2e-6)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    # A loop reads all that its turns do.
    assert lies(strategy, state) == lies(strategy, want)
    assert isinstance(state[1][0].mu["w"], js.Sharded)


def branched(params, x):
    loss, grads = mean(jax.value_and_grad(loss_of)(params, x))
    moved = lambda: jax.tree.map(lambda a, g: a - g, params, grads)  # noqa: E731
    return lax.cond(loss > 0, moved, lambda: params)


def reduced_in_a_loop(params, x):
    def turn(params, _):
        loss, grads = mean(jax.value_and_grad(loss_of)(params, x))
        return jax.tree.map(lambda a, g: a - g, params, grads), loss

    return lax.scan(turn, params, length=3)


def tied(params, x):
    def loss(p):
        return ((jnp.tanh(x @ p["w"]) @ p["w"].T) ** 2).mean() + p["b"].sum()

    return jax.tree.map(lambda a, g: a - g, params, mean(jax.grad(loss)(params)))


def returns_all(params, x):
    grads = jax.grad(loss_of)(params, x)
    mine, ours = grads, mean(grads)
    new = jax.tree.map(lambda a, g: a - g, params, ours)
    return new, new, params, mine, ours, x @ params["w"], x @ new["w"]


def merges(params, x):
    def update(strategy, grads):
        return strategy.reduce("mean", grads, axis=None)

    grads = replica().merge_call(update, (jax.grad(loss_of)(params, x),))
    return jax.tree.map(lambda a, g: a - g, params, grads)


def in_half_precision(params, x):
    def loss(params):
        half = js.training.cast_floating(params, jnp.bfloat16)
        return loss_of(half, x.astype(jnp.bfloat16)).astype(jnp.float32)

    grads = mean(jax.grad(loss)(params))
    is_finite = js.training.all_finite(grads)
    return jax.tree.map(lambda a, g: jnp.where(is_finite, a - g, a), params, grads)


def matrices(params, x):
    product = mean(x).T @ mean(x) + jnp.eye(16)
    found = jnp.linalg.cholesky(product), jnp.linalg.qr(product)[0], jnp.sort(product)
    return {**params, "w": params["w"] + sum(found)}


INSIDE = [
    branched, reduced_in_a_loop, returns_all, merges, in_half_precision, tied, matrices,
]  # fmt: skip


@pytest.mark.slow
@each_of("step", INSIDE)
def test_all_that_steps_may_do(step):
    assert_as_whole(lambda s: s.run(step, (start(), rows_of(s))))


def captures(strategy):
    params, memory = strategy.mirror(start()), strategy.mirror(ADAM.init(start()))

    def step(x):
        grads = mean(jax.grad(loss_of)(params, x))
        return ADAM.update(grads, memory, params)

    def deep(x):
        def loss(w):
            hidden, _ = lax.scan(lambda h, row: (jnp.tanh(h * row[None]), None), x, w)
            return jax.nn.softmax(hidden).max() + jnp.zeros_like(w).sum()

        held = jax.new_ref(params["w"])
        lax.fori_loop(0, 2, lambda i, _: held.__setitem__(..., held[...] + i), None)
        return mean(jax.grad(loss)(held[...]))

    x = rows_of(strategy)
    return [strategy.run(f, (x,)) for f in (step, jax.jit(step), deep)]


@pytest.mark.slow
def test_state_that_a_step_captures_may_lie_divided():
    assert_as_whole(captures)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first: Any = nnx.Linear(16, 32, rngs=rngs)
        self.norm: Any = js.flax.nnx.BatchNorm(32, rngs=rngs)
        self.dropout: Any = nnx.Dropout(0.5, rngs=rngs)
        self.last: Any = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        hidden = self.dropout(nnx.relu(self.norm(self.first(x))))
        return self.last(hidden)


def trained_nnx(strategy):
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @strategy.step
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, mean(grads))
        return mean(loss)

    for _ in range(2):
        loss = step(model, optimizer, rows_of(strategy))
    return model, optimizer, loss


@pytest.mark.slow
def test_modules_and_their_optimizer():
    strategy = sharded(4)
    model, optimizer, loss = trained_nnx(strategy)
    want_model, want_optimizer, want_loss = trained_nnx(whole(4))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    state = nnx.to_pure_dict(nnx.state((model, optimizer)))
    want = nnx.to_pure_dict(nnx.state((want_model, want_optimizer)))
    assert_alike(state, want, 1e-5)
    kernel = model.first.kernel[...]
    assert kernel.shape == (16, 32)
    assert isinstance(kernel, js.Sharded)
    assert isinstance(optimizer.opt_state[0].mu["first"]["kernel"][...], js.Sharded)
    assert isinstance(model.dropout.rngs.count[...], js.Mirrored)


def uneven(strategy):
    def step(params, x):
        def loss(params):
            return js.masked_mean((jnp.tanh(x @ params["w"]) ** 2).mean(-1))

        loss, grads = mean(jax.value_and_grad(loss)(params))
        return jax.tree.map(lambda a, g: a - g, params, grads), loss

    params, losses = start(), []
    data = strategy.experimental_distribute_dataset(js.batches(drawn(13, 16), 5))
    for batch in data:
        params, loss = strategy.run(step, (params, batch))
        losses.append(loss)
    return params, losses


def test_padded_rows():
    assert_as_whole(uneven)


@each_shard
def test_a_forgotten_reduction_is_no_array_of_parts(shard):
    def step(state, x):
        return {"w": state["w"] - x.sum(), "n": state["n"] + 1}

    strategy = sharded(4, shard)
    state = {"w": drawn(16, 16), "n": 0}
    with pytest.raises(js.errors.NotMirroredError, match=r"varies since: .*x\.sum\(\)"):
        strategy.run(step, (state, rows_of(strategy)))
