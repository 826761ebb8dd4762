"""Steps under `StateSharding`: the same numbers, in parts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.cases import each_of
from helpers.divided import SHARDS, assert_alike, drawn, lies, sharded, whole
from helpers.replicas import ids, replica
from jax import lax

import jaxstrategy as js

each_shard = each_of("shard", SHARDS)
ADAM = optax.adam(0.1)


def mean(tree):
    return replica().all_reduce("mean", tree)


def scales(strategy):
    """1, 2, ... on the replicas, whose mean is 4.5 if they are 8."""
    count = strategy.num_replicas_in_sync
    return strategy.per_replica([np.float32(i + 1) for i in range(count)])


def test_small_arrays_are_reduced_in_one_pack():
    strategy = sharded(min_bytes=1024)
    state = {f"b{i}": drawn(8, seed=i) for i in range(20)}
    text = compiled_text(strategy, lambda s, x: jax.tree.map(
        lambda a, g: a - g, s, mean(jax.tree.map(lambda a: a * x, s))
    ), state, scales(strategy))  # fmt: skip
    assert count(text, "all-reduce") == 1
    assert count(text, "reduce-scatter") == count(text, "all-gather") == 0


def compiled_text(strategy, step, *args):
    """XLA's text of a step, without what holds its line's names."""
    return jax.jit(lambda *a: strategy.run(step, a)).lower(*args).compile().as_text()


def count(text, kind):
    return sum(f" {kind}(" in line or f" {kind}-start(" in line
               for line in text.splitlines())  # fmt: skip


@pytest.mark.slow
@each_shard
def test_parameters_are_gathered_once_and_moments_never(shard):
    strategy = sharded(shard=shard)
    step, given = train(ADAM), batch(strategy)
    state, _ = strategy.run(step, (start(ADAM), given))
    text = compiled_text(strategy, step, state, given)
    # Two kernels and two biases; the loss is the only number that is summed.
    assert (count(text, "reduce-scatter"), count(text, "all-gather")) == (4, 4)
    assert count(text, "all-reduce") == 1
    assert count(text, "all-to-all") == count(text, "collective-permute") == 0


def start(optimizer):
    params = {
        "one": {"kernel": drawn(8, 16), "bias": drawn(16, seed=1)},
        "two": {"kernel": drawn(16, 8, seed=2), "bias": drawn(8, seed=3)},
    }
    return params, optimizer.init(params)


def batch(strategy, rows=4):
    count = strategy.num_replicas_in_sync
    x, y = drawn(2, count, rows, 8, seed=4)
    return strategy.per_replica(list(x)), strategy.per_replica(list(y))


def predict(params, x):
    one, two = params["one"], params["two"]
    hidden = jnp.tanh(x @ one["kernel"] + one["bias"][None])
    return hidden @ two["kernel"] + two["bias"][None]


def loss_of(params, x, y):
    return ((predict(params, x) - y) ** 2).mean()


def train(optimizer):
    def step(state, batch):
        params, memory = state
        loss, grads = jax.value_and_grad(loss_of)(params, *batch)
        loss, grads = mean((loss, grads))
        updates, memory = optimizer.update(grads, memory, params)
        return (optax.apply_updates(params, updates), memory), loss

    return step


@functools.cache
def trained_alone():
    """The state and losses of one device that has the rows of all."""
    x, y = drawn(2, 8, 4, 8, seed=4).reshape(2, -1, 8)

    @jax.jit
    def step(params, memory):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, memory = ADAM.update(grads, memory, params)
        return (optax.apply_updates(params, updates), memory), loss

    state, losses = start(ADAM), []
    for _ in range(3):
        state, loss = step(*state)
        losses.append(loss)
    return state, losses


@each_of(
    "shard, devices, lanes",
    [("state", 1, 1), ("state", 4, 1), ("optimizer", 4, 1), ("state", 2, 4)],
)
def test_training_is_that_of_one_device_with_all_rows(shard, devices, lanes):
    strategy = js.MirroredStrategy(
        jax.devices()[:devices],
        sharding=js.StateSharding(shard, min_bytes=0),
        replicas_per_device=lanes,
    )
    replicas, step, state = devices * lanes, train(ADAM), start(ADAM)
    given = [a.reshape(replicas, -1, 8) for a in drawn(2, 8, 4, 8, seed=4)]
    own = tuple(strategy.per_replica(list(a)) for a in given)
    losses = []
    for _ in range(3):
        state, loss = strategy.run(step, (state, own))
        losses.append(loss)
    want, their_losses = trained_alone()
    np.testing.assert_allclose(losses, their_losses, rtol=1e-5)
    assert_alike(state, want, 1e-4)
    assert isinstance(state[1][0].mu["one"]["kernel"], js.Sharded) == (devices > 1)


PLACES = {
    "numpy": lambda strategy, tree: tree,
    "one device": lambda strategy, tree: jax.device_put(tree, jax.devices()[5]),
    "whole": lambda strategy, tree: whole(4).mirror(tree),
    "other dimensions": lambda strategy, tree: jax.tree.map(
        lambda a: jax.device_put(a, strategy._replicas.sharding(0))
        if np.ndim(a) and np.shape(a)[0] % 4 == 0 else a, tree),
    "mirrored": lambda strategy, tree: strategy.mirror(tree),
}  # fmt: skip


@functools.cache
def trained_whole():
    return whole(4).run(train(ADAM), (start(ADAM), batch(whole(4))))


@pytest.mark.slow
@each_shard
def test_state_may_come_from_anywhere_and_is_traced_once(shard):
    strategy, step, traces = sharded(4, shard), train(ADAM), []

    def counting(state, batch):
        traces.append(1)
        return step(state, batch)

    for name, place in PLACES.items():
        state = place(strategy, start(ADAM))
        have = strategy.run(counting, (state, batch(strategy)))
        assert_alike(have, trained_whole(), 1e-6)
        (params, memory), _ = have
        kernel = {"state": 1, "optimizer": None}[shard]
        assert strategy._replicas.dimension_of(params["one"]["kernel"]) == kernel, name
        assert strategy._replicas.dimension_of(memory[0].nu["one"]["kernel"]) == 1
    assert len(traces) == 1


@pytest.mark.slow
def test_divided_state_is_moved_or_refused_elsewhere():
    step = train(ADAM)
    state, _ = sharded(8).run(step, (start(ADAM), batch(sharded(8))))
    held = jax.tree.map(np.asarray, state)
    for other in (sharded(8, "optimizer"), js.OneDeviceStrategy("CPU:3")):
        have = other.run(step, (state, batch(other)))
        assert_alike(have, other.run(step, (held, batch(other))))
    for other in (whole(8), sharded(4)):
        with pytest.raises(js.errors.PlacementError, match=r"pass `strategy\.mirror"):
            other.run(step, (state, batch(other)))
        have = other.run(step, (other.mirror(state), batch(other)))
        assert_alike(have, other.run(step, (held, batch(other))))


def layers(count=3):
    return {"layers": drawn(count, 16, 16) / 4, "bias": drawn(16, seed=1)}


def deep_loss(params, x, **options):
    def layer(h, kernel):
        return jnp.tanh(h @ kernel), None

    h, _ = lax.scan(layer, x + params["bias"][None], params["layers"], **options)
    return (h**2).mean()


def rows_of(strategy, seed=4):
    return strategy.per_replica(
        list(drawn(strategy.num_replicas_in_sync, 4, 16, seed=seed))
    )


def descend(params, grads):
    return jax.tree.map(lambda a, g: a - 0.1 * g, params, grads)


@pytest.mark.slow
@each_shard
def test_the_user_chooses_for_state_only(shard):
    asked = {}

    def choose(path, leaf):
        asked[path] = leaf.shape
        return {"['layers']": 2, "['bias']": None}[path]

    def step(params, x):
        more = mean(x @ params["layers"][0])  # of a shape that no state has
        return descend(params, mean(jax.grad(deep_loss)(params, x))), more * 2

    strategy = sharded(4, shard, dimension=choose)
    have = strategy.run(step, (layers(), rows_of(strategy)))
    assert asked == {"['layers']": (3, 16, 16), "['bias']": (16,)}
    assert_alike(have, (s := whole(4)).run(step, (layers(), rows_of(s))), 1e-6)
    place = {"state": 2, "optimizer": None}[shard]
    assert lies(strategy, have[0]) == {"['layers']": place, "['bias']": None}


# Steps with divided state in all that may be around them, and in what they use.


def begin():
    return {"w": drawn(16, 16) / 4, "b": drawn(16, seed=1)}


def own_rows(strategy):
    return strategy.per_replica(
        list(drawn(strategy.num_replicas_in_sync, 4, 16, seed=2))
    )


def tanh_loss(params, x):
    return (jnp.tanh(x @ params["w"] + params["b"][None]) ** 2).mean()


def adam_step(state, x):
    params, memory = state
    loss, grads = jax.value_and_grad(tanh_loss)(params, x)
    loss, grads = mean((loss, grads))
    updates, memory = ADAM.update(grads, memory, params)
    return (optax.apply_updates(params, updates), memory), loss


def assert_as_whole(do, tolerance=2e-6):
    """That `do(strategy)` gives the same on divided and on whole state."""
    assert_alike(do(sharded(4)), do(whole(4)), tolerance)


def donated(strategy):
    state = strategy.mirror((begin(), ADAM.init(begin())))
    for _ in range(3):
        before = state
        options = js.RunOptions(donate_argnums=0)
        state, _ = strategy.run(adam_step, (state, own_rows(strategy)), options=options)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    return state


def scanned(strategy):
    x = own_rows(strategy)
    state = jax.tree.map(jnp.asarray, (begin(), ADAM.init(begin())))

    @jax.jit
    def loop(state):
        return lax.scan(lambda s, _: strategy.run(adam_step, (s, x)), state, length=3)

    return loop(state)


def differentiated(strategy):
    def loss(params):
        state, loss = strategy.run(adam_step, ((params, memory), own_rows(strategy)))
        return loss + sum(map(jnp.sum, jax.tree.leaves(state[0])))

    memory = ADAM.init(begin())
    return jax.value_and_grad(loss)(strategy.mirror(begin()))


def batched(strategy):
    two = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), begin())

    def step(params, x):
        grads = mean(jax.grad(tanh_loss)(params, x))
        return jax.tree.map(lambda a, g: a - g, params, grads)

    return jax.vmap(lambda p: strategy.run(step, (p, own_rows(strategy))))(two)


@pytest.mark.slow
@each_of("around", [donated, scanned, differentiated, batched])
def test_all_that_may_be_around_a_call(around):
    assert_as_whole(around, 1e-5)


@pytest.mark.slow
def test_several_steps_in_one_call_are_those_of_as_many():
    strategy, given = sharded(4), (begin(), ADAM.init(begin()))
    state, losses = strategy.several(adam_step)(given, [own_rows(strategy)] * 4)
    want, want_losses = given, []
    for _ in range(4):
        want, loss = strategy.run(adam_step, (want, own_rows(strategy)))
        want_losses.append(loss)
    assert_alike(state, want, 2e-6)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    # A loop reads all that its turns do.
    assert lies(strategy, state) == lies(strategy, want)
    assert isinstance(state[1][0].mu["w"], js.Sharded)


def tied(params, x):
    def loss(p):
        return ((jnp.tanh(x @ p["w"]) @ p["w"].T) ** 2).mean() + p["b"].sum()

    return jax.tree.map(lambda a, g: a - g, params, mean(jax.grad(loss)(params)))


def returns_all(params, x):
    grads = jax.grad(tanh_loss)(params, x)
    mine, ours = grads, mean(grads)
    new = jax.tree.map(lambda a, g: a - g, params, ours)
    return new, new, params, mine, ours, x @ params["w"], x @ new["w"]


def in_half_precision(params, x):
    def loss(params):
        half = js.training.cast_floating(params, jnp.bfloat16)
        return tanh_loss(half, x.astype(jnp.bfloat16)).astype(jnp.float32)

    grads = mean(jax.grad(loss)(params))
    is_finite = js.training.all_finite(grads)
    return jax.tree.map(lambda a, g: jnp.where(is_finite, a - g, a), params, grads)


def matrices(params, x):
    product = mean(x).T @ mean(x) + jnp.eye(16)
    found = jnp.linalg.cholesky(product), jnp.linalg.qr(product)[0], jnp.sort(product)
    return {**params, "w": params["w"] + sum(found)}


INSIDE = [returns_all, in_half_precision, tied, matrices]


@pytest.mark.slow
@each_of("step", INSIDE)
def test_all_that_steps_may_do(step):
    assert_as_whole(lambda s: s.run(step, (begin(), own_rows(s))))


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
        loss = step(model, optimizer, own_rows(strategy))
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


@each_shard
def test_a_forgotten_reduction_is_no_array_of_parts(shard):
    def step(state, x):
        return {"w": state["w"] - x.sum(), "n": state["n"] + 1}

    strategy = sharded(4, shard)
    state = {"w": drawn(16, 16), "n": 0}
    with pytest.raises(js.errors.NotMirroredError, match=r"varies since: .*x\.sum\(\)"):
        strategy.run(step, (state, own_rows(strategy)))


# State divided over the devices of replicas that share them: whole state's numbers.


@pytest.fixture(scope="module")
def divided():
    """8 replicas on 2 devices, of which each has one half of the state."""
    return js.MirroredStrategy(
        jax.devices()[:2],
        sharding=js.StateSharding("state", min_bytes=0),
        replicas_per_device=4,
    )


def test_one_device_has_all(divided):
    alone = js.MirroredStrategy(
        jax.devices()[:1],
        sharding=divided._replicas.state_sharding,
        replicas_per_device=8,
    )
    w = alone.mirror(np.ones(16, np.float32))

    def step(w, x):
        return w - replica().all_reduce("mean", x)

    np.testing.assert_array_equal(alone.run(step, (w, ids(alone))), np.full(16, -2.5))
    assert "share one device" in str(alone.explain(step, (w, ids(alone))))


def test_sums_are_scattered(divided):
    w = divided.mirror(np.ones((64, 8), np.float32))

    def step(w, x):
        grads = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
        return w - replica().all_reduce("mean", grads)

    given = w, js.PerReplica(np.ones((8, 2, 64), np.float32))
    program = jax.jit(lambda *given: divided.run(step, given)).lower(*given).compile()
    text = program.as_text()
    assert "reduce-scatter" in text and "all-gather" in text
    assert not [line for line in text.splitlines() if "all-reduce(" in line]
