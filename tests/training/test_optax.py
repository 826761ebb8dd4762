"""Optax transformations that act across replicas."""

import jax
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from helpers.trees import assert_close

import jaxstrategy as js

PARAMS = {"w": np.float32([1.0, -2.0]), "b": np.float32(0.5)}


def gradients(n, steps=1, seed=0):
    """Of each replica: a list of trees `[replica, ...]`, some far from the others."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        far = np.arange(1, n + 1).reshape(-1, *[1] * np.ndim(leaf))
        return (rng.normal(size=(n, *np.shape(leaf))) * far).astype(np.float32)

    return [jax.tree.map(draw, PARAMS) for _ in range(steps)]


def on_replicas(strategy, tx, grads):
    """Parameters after a step on each of `grads`."""

    @strategy.run(options=js.RunOptions(expect_mirrored=(True, False)))
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for grad in grads:
        params, state = step(params, state, strategy.per_replica(grad))
    return params, state


def alone(tx, grads):
    """The same by plain Optax, on the mean gradients."""

    @jax.jit
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, jax.jit(tx.init)(PARAMS)
    for grad in grads:
        grad = jax.tree.map(lambda g: g.mean(0), grad)
        params, state = step(params, state, grad)
    return params


@each_of("op, function", [("mean", np.mean), ("SUM", np.sum)])
def test_gradients_are_reduced(strategy, op, function):
    (grad,) = gradients(strategy.num_replicas_in_sync)
    tx = js.optax.all_reduce_gradients(op)
    have, state = strategy.run(tx.update, (strategy.per_replica(grad), tx.init(PARAMS)))
    assert state == optax.EmptyState()
    assert_close(have, jax.tree.map(lambda g: function(g, axis=0), grad))


def chains():
    reduce = js.optax.all_reduce_gradients
    return {
        "clip": (lambda: optax.clip_by_global_norm(0.5), 1),
        "adam": (lambda: optax.adam(0.1), 3),
        "ema": (lambda: optax.ema(0.9), 3),
        "schedule": (lambda: optax.sgd(optax.linear_schedule(0.0, 1.0, 3)), 4),
        "masked": (lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}), 2),
    }, reduce


@pytest.mark.slow
@each_of("name", chains()[0])
def test_what_follows_sees_reduced_gradients(four, name):
    (rest, steps), reduce = chains()[0][name], chains()[1]
    grads = gradients(4, steps)
    have, _ = on_replicas(four, optax.chain(reduce(), rest()), grads)
    assert_close(have, alone(rest(), grads))


def test_options_reach_the_reduction(two):
    one_each = js.experimental.CommunicationOptions(bytes_per_pack=1)
    (grad,) = gradients(2)
    for options, wanted in ((None, 1), (one_each, 2)):
        tx = js.optax.all_reduce_gradients("mean", options)
        found = two.explain(tx.update, (two.per_replica(grad), tx.init(PARAMS)))
        assert len(found.collectives) == wanted


def test_what_cannot_be_reduced_or_checked_is_refused(two):
    with pytest.raises(ValueError, match="'PROD' is not a valid ReduceOp"):
        js.optax.all_reduce_gradients("PROD")
    with pytest.raises(TypeError, match="a `CommunicationOptions` was wanted"):
        js.optax.all_reduce_gradients("mean", {"bytes_per_pack": 1})
    tx = optax.MultiSteps(optax.chain(REDUCE, optax.adam(1)), 2)
    with pytest.raises(ValueError, match="All updates of 1 steps are zero, so nothing"):
        js.optax.check_chain(tx, PARAMS, strategy=two)
    one = js.OneDeviceStrategy("CPU:0")
    with pytest.raises(ValueError, match="has nothing to reduce; give a strategy with"):
        js.optax.check_chain(tx, PARAMS, strategy=one)


def test_all_replicas_skip_a_step_that_one_cannot_take(four):
    tx = js.optax.apply_if_finite(
        optax.chain(js.optax.all_reduce_gradients(), optax.sgd(0.1)), 2
    )
    good, bad = gradients(4, 2)
    bad["w"][3, 0] = np.inf
    have, state = on_replicas(four, tx, [good, bad, bad, good])
    assert_close(have, alone(optax.sgd(0.1), [good, good]))
    assert (int(state.notfinite_count), int(state.total_notfinite)) == (0, 2)
    assert bool(state.last_finite)
    have, state = on_replicas(four, tx, [good, bad])
    assert_close(have, alone(optax.sgd(0.1), [good]))
    assert isinstance(state, optax.ApplyIfFiniteState)
    assert not state.last_finite and all(
        isinstance(leaf, js.Mirrored) for leaf in jax.tree.leaves(state)
    )


def test_after_too_many_skipped_steps_it_gives_up(two):
    tx = js.optax.apply_if_finite(
        optax.chain(js.optax.all_reduce_gradients(), optax.sgd(0.1)), 2
    )
    (bad,) = gradients(2)
    bad["b"][0] = np.nan
    have, _ = on_replicas(two, tx, [bad, bad])
    assert_close(have, PARAMS)
    have, state = on_replicas(two, tx, [bad, bad, bad])
    assert np.isnan(have["b"]) and int(state.notfinite_count) == 3


def test_optaxs_own_around_a_reduction_would_hang_and_is_refused(two):
    tx = optax.apply_if_finite(
        optax.chain(js.optax.all_reduce_gradients(), optax.sgd(0.1)), 2
    )
    with pytest.raises(js.errors.DivergentCollectiveError, match="wait for ever"):
        on_replicas(two, tx, gradients(2))


REDUCE = js.optax.all_reduce_gradients()
RIGHT = {
    "first": (optax.chain(REDUCE, optax.clip_by_global_norm(1.0), optax.adam(1)), 2),
    "after what is linear": (optax.chain(optax.scale(3.0), REDUCE, optax.sgd(1)), 1),
    "around": (optax.MultiSteps(optax.chain(REDUCE, optax.adam(1)), 2), 2),
    "in 16 bits": (
        optax.chain(
            js.optax.all_reduce_gradients(
                "mean", js.experimental.CommunicationOptions(reduce_dtype="bfloat16")
            ),
            optax.sgd(1),
        ),
        1,
    ),
}
WRONG = {
    "clip": optax.chain(optax.clip_by_global_norm(1.0), REDUCE),
    "element": optax.chain(optax.clip(1.0), REDUCE, optax.sgd(1)),
    "adam": optax.chain(optax.adam(1), REDUCE),
    "none": optax.sgd(1),
}


@pytest.mark.filterwarnings("ignore::jaxstrategy.errors.RecompilationWarning")
@each_of("name", RIGHT)
def test_right_chains_pass_the_check(two, name):
    tx, steps = RIGHT[name]
    js.optax.check_chain(tx, PARAMS, strategy=two, steps=steps)


@pytest.mark.filterwarnings("ignore::jaxstrategy.errors.RecompilationWarning")
@each_of("name", WRONG)
def test_wrong_chains_are_found(two, name):
    message = (
        r"The update of `params\['[wb]'\]` depends on how the gradients are spread "
        r"over the replicas: .* put `all_reduce_gradients\(\)` first in the chain"
    )
    with pytest.raises(ValueError, match=message):
        js.optax.check_chain(WRONG[name], PARAMS, strategy=two)
