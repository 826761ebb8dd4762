"""`js.optax.outer`: the oracle is a plain loop of workers that know of no other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from helpers.cases import each_of
from helpers.trees import assert_close

import jaxstrategy as js

PARAMS = {"w": np.float32([0.5, -1.0, 2.0]), "b": np.float32(0.3)}
MAY_VARY = js.RunOptions(expect_mirrored=False)


def loss_of(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def data(n, steps, rows=5):
    """Of each step and replica other rows, `[step, replica, row, ...]`."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(steps, n, rows, 3)).astype(np.float32)
    noise = draw.normal(size=(steps, n, rows)).astype(np.float32)
    return x, x.sum(-1) + np.float32(0.5) * noise


def workers(inner, outer, every, batches):
    """The parameters after each synchronization, by a loop over workers."""

    @jax.jit
    def step(params, state, x, y):
        updates, state = inner.update(jax.grad(loss_of)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def meet(w, own, state):
        way = jax.tree.map(lambda w, *own: w - sum(own) / len(own), w, *own)
        updates, state = outer.update(way, state, w)
        return optax.apply_updates(w, updates), state

    x, y = batches
    (steps, n), w = x.shape[:2], PARAMS
    own, outer_state = [w] * n, outer.init(w)
    states, met = [inner.init(w)] * n, []
    for t in range(steps):
        for r in range(n):
            own[r], states[r] = step(own[r], states[r], x[t, r], y[t, r])
        if (t + 1) % every == 0:
            w, outer_state = meet(w, own, outer_state)
            own = [w] * n
            met.append(w)
    return met


def stepping(strategy, tx, options=MAY_VARY):
    @strategy.run(options=options)
    def step(params, state, x, y):
        updates, state = tx.update(jax.grad(loss_of)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    return step


def trained(strategy, tx, batches, options=MAY_VARY, start=None, step=None):
    """Parameters and state after each step."""
    step = step or stepping(strategy, tx, options)
    params, state = start or (PARAMS, tx.init(PARAMS))
    for x, y in zip(*batches, strict=True):
        each = strategy.per_replica(x), strategy.per_replica(y)
        params, state = step(params, state, *each)
        yield params, state


def diloco(inner, every=4):
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return js.optax.outer(inner, outer, every=every), outer


def test_three_rounds_are_those_of_workers_alone(two):
    inner, batches = optax.adamw(0.05), data(2, 12)
    tx, outer = diloco(inner)
    found = list(trained(two, tx, batches))
    want = workers(inner, outer, 4, batches)
    assert_close([state.params for _, state in found[3::4]], want)
    for (params, _), met in zip(found[3::4], want, strict=True):
        for name in met:
            for own in params[name].values:
                assert_close(own, met[name])
    # In between each replica goes its own way.
    params, state = found[5]
    assert len(np.unique(np.asarray(params["w"].stacked)[:, 0])) == 2
    assert_close(state.params, want[0])
    assert int(state.steps) == 2


def test_by_default_the_parameters_are_averaged(two):
    inner, batches = optax.sgd(0.1, momentum=0.9), data(2, 6)
    *_, (_, state) = trained(two, js.optax.outer(inner, every=3), batches)
    assert_close(state.params, workers(inner, optax.sgd(1.0), 3, batches)[-1])


def test_only_the_parameters_are_sent_and_only_every_few_steps(four):
    tx, _ = diloco(optax.adam(0.1))
    x, y = map(four.per_replica, (batch[0] for batch in data(4, 1)))
    step = stepping(four, tx)
    (found,) = four.explain(step, (PARAMS, tx.init(PARAMS), x, y)).collectives
    assert (found.nbytes, found.in_branch, found.loops) == (16, True, ())


def test_that_parameters_become_each_replicas_own_is_told(two):
    tx = js.optax.outer(optax.sgd(0.1), every=2)
    told = r"returns `step\(\.\.\.\)\[0\].*expect_mirrored=False"
    with pytest.warns(js.errors.NotMirroredWarning, match=re.compile(told, re.DOTALL)):
        list(trained(two, tx, data(2, 1), options=None))


def test_a_state_of_own_copies_stays_in_its_form(four, tmp_path):
    tx, outer = diloco(optax.adam(0.05), every=3)
    batches, traces = data(4, 6), []

    def init():
        return js.optax.own_copies((PARAMS, tx.init(PARAMS)), strategy=four)

    @four.run
    def step(params, state, x, y):
        traces.append(1)
        updates, state = tx.update(jax.grad(loss_of)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    found = list(trained(four, tx, batches, start=init(), step=step))
    assert len(traces) == 1
    want = workers(optax.adam(0.05), outer, 3, batches)
    assert_close([found[2][1].params, found[5][1].params], want)
    assert jax.tree.structure(found[-1]) == jax.tree.structure(init())
    with js.checkpoint.CheckpointManager(tmp_path, four) as manager:
        manager.save(4, found[3])
    with js.checkpoint.CheckpointManager(tmp_path, four) as manager:
        start, done = manager.restore_or_init(init)
    rest = tuple(part[done:] for part in batches)
    *_, end = trained(four, tx, rest, start=start, step=step)
    jax.tree.map(np.testing.assert_array_equal, end, found[-1])


def test_own_copies_are_of_floating_point_numbers(two):
    tx = js.optax.outer(optax.adam(0.1), every=2)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    own = js.optax.own_copies({"state": state, "rate": 0.5}, strategy=two)
    for leaf, wanted in [
        (own["state"].params["w"], PARAMS["w"]),
        (own["state"].opt_state.inner_state[0].mu["w"], np.zeros(3)),
        (own["rate"], 0.5),
    ]:
        assert leaf.stacked.sharding.spec == jax.P("replica")
        np.testing.assert_array_equal(leaf.stacked, [wanted] * 2)
    assert own["state"].step == 0 and own["state"].opt_state.inner_state[0].count == 0
    assert own["state"].opt_state.params["w"] is state.opt_state.params["w"]
    again = js.optax.own_copies(own, strategy=two)
    assert again["state"].params["w"] is own["state"].params["w"]
    with pytest.raises(TypeError, match="`strategy` was 3; a strategy was wanted"):
        js.optax.own_copies(own, strategy=3)
    with pytest.raises(js.errors.ContextError, match="called inside `run`"):
        two.run(lambda w: js.optax.own_copies(w, strategy=two), (1.0,))


@each_of(
    "every, error, told",
    [
        (0, ValueError, "`every` was 0; a replica takes at least one step by itself"),
        (-3, ValueError, "`every` was -3; a replica takes at least one step"),
        (2.0, TypeError, r"`every` was 2\.0; the number of steps .* wanted"),
        (True, TypeError, "`every` was True; the number of steps"),
    ],
)
def test_every_is_a_number_of_steps(every, error, told):
    with pytest.raises(error, match=told):
        js.optax.outer(optax.sgd(0.1), every=every)


def test_what_cannot_be_is_refused(two):
    with pytest.raises(TypeError, match="`inner` was 0.1; a transformation of Optax"):
        js.optax.outer(0.1, every=2)
    with pytest.raises(TypeError, match="`outer` was 0.7; a transformation of Optax"):
        js.optax.outer(optax.sgd(0.1), 0.7, every=2)
    with pytest.raises(TypeError, match="`options` was 3; a `CommunicationOptions`"):
        js.optax.outer(optax.sgd(0.1), every=2, options=3)
    compressed = js.experimental.CommunicationOptions(compression="int8")
    with pytest.raises(ValueError, match="compression"):
        js.optax.outer(optax.sgd(0.1), every=2, options=compressed)
    tx = js.optax.outer(optax.sgd(0.1), every=2)
    with pytest.raises(ValueError, match="`outer` was not given the parameters"):
        tx.update(PARAMS, tx.init(PARAMS))
    tx = js.optax.outer(optax.sgd(0.1), every=2)
    with pytest.raises(TypeError, match=r"`params\['n'\]` is int32, which has no mean"):
        tx.init({"n": np.int32(3)})
    own = {"w": two.per_replica([1.0, 2.0])}
    with pytest.raises(TypeError, match=r"`params\['w'\]` is a PerReplica, but .*"):
        tx.init(own)
    tx = js.optax.outer(optax.sgd(0.1), every=1)
    state = tx.init(1.0)
    with (
        two.scope(),
        pytest.raises(js.errors.ContextError, match="`outer` was used in cross"),
    ):
        tx.update(1.0, state, 1.0)
