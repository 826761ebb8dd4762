"""Steps under `StateSharding`: the same numbers, in parts.

Oracles: arithmetic, the same step on one device, and the same on whole state.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from helpers.divided import SHARDS, assert_alike, drawn, lies, sharded, whole
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js

AXIS = "replica"
each_shard = each_of("shard", SHARDS)
ADAM = optax.adam(0.1)


def mean(tree):
    return replica().all_reduce("mean", tree)


def scales(strategy):
    """1, 2, ... on the replicas, whose mean is 4.5 if they are 8."""
    count = strategy.num_replicas_in_sync
    return strategy.per_replica([np.float32(i + 1) for i in range(count)])


@each_shard
def test_what_no_dimension_divides_stays_whole(shard):
    strategy = sharded(shard=shard)
    state = {
        "odd": drawn(10, 3),
        "second": drawn(3, 16),
        "first": drawn(16, 16),
        "number": np.float32(1),
        "empty": np.zeros((0, 8), np.float32),
        "key": jax.random.key(0),
    }

    def step(state, x):
        more = mean(x)
        key = jax.random.split(state.pop("key"))[0]
        return {**jax.tree.map(lambda a: a + more, state), "key": key}

    new = strategy.run(step, (dict(state), scales(strategy)))
    assert lies(strategy, new) == {
        "['odd']": None, "['second']": 1, "['first']": 0, "['number']": None,
        "['empty']": None, "['key']": None,
    }  # fmt: skip
    want = {name: state[name] + np.float32(4.5) for name in ("odd", "second", "first")}
    assert_alike({name: new[name] for name in want}, want)
    assert new["number"] == 5.5


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


@each_of("shard, replicas", [("state", 1), ("state", 4), ("optimizer", 4)])
def test_training_is_that_of_one_device_with_all_rows(shard, replicas):
    strategy, step, state = sharded(replicas, shard), train(ADAM), start(ADAM)
    given = [a.reshape(replicas, -1, 8) for a in drawn(2, 8, 4, 8, seed=4)]
    own = tuple(strategy.per_replica(list(a)) for a in given)
    losses = []
    for _ in range(3):
        state, loss = strategy.run(step, (state, own))
        losses.append(loss)
    want, their_losses = trained_alone()
    np.testing.assert_allclose(losses, their_losses, rtol=1e-5)
    assert_alike(state, want, 1e-4)
    assert isinstance(state[1][0].mu["one"]["kernel"], js.Sharded) == (replicas > 1)


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
        with pytest.raises(
            js.errors.PlacementError, match=r"pass `strategy\.mirror\(array\)`"
        ):
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
def test_all_conversions_of_what_a_loop_stacks_are_done():
    def step(params, x):
        grads = jax.grad(lambda p: 1000 * deep_loss(p, x))(params)
        grads["layers"] = grads["layers"].astype(jnp.int8).astype(jnp.float32)
        return descend(params, lax.psum(grads, AXIS))

    have = (s := sharded(4)).run(step, (layers(), rows_of(s)))
    want = (s := whole(4)).run(step, (layers(), rows_of(s)))
    assert np.any(np.asarray(want["layers"]) != layers()["layers"])
    assert_alike(have, want, 1e-6)


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
