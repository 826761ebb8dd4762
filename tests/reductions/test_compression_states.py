"""Where what was not sent is kept: in steps, in Optax, on disk; and what is refused."""

import jax
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from helpers.reductions import on
from helpers.replicas import replica

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager, MismatchError
from jaxstrategy.experimental import CommunicationOptions

INT8 = CommunicationOptions(compression="int8")
RANK1 = CommunicationOptions(compression=js.experimental.PowerSGD(rank=1))
BOTH = each_of("options", [INT8, RANK1])
PARAMS = {"b": np.ones(3, np.float32), "w": np.ones((16, 20), np.float32)}
OWN = js.RunOptions(expect_mirrored=lambda path, _: "errors" not in str(path))


def gradients(n, seed=0):
    draw = np.random.default_rng(seed).normal
    return {k: draw(size=(n, *x.shape)).astype(np.float32) for k, x in PARAMS.items()}


def transformation(options, rest=None):
    rest = rest or optax.sgd(0.1)
    return optax.chain(js.optax.all_reduce_gradients(options=options), rest)


def trained(strategy, tx, grads, state=None, params=PARAMS):
    """Parameters and state after a step on each of `grads`."""

    @strategy.run(options=OWN)
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    if state is None:
        state = strategy.init(tx.init, PARAMS)
    for grad in grads:
        params, state = step(params, state, strategy.per_replica(grad))
    return params, state


def compression(state):
    """The one `CompressionState` in a state of Optax."""

    def is_one(node):
        return isinstance(node, js.experimental.CompressionState)

    (found,) = filter(is_one, jax.tree.leaves(state, is_leaf=is_one))
    return found


def assert_same(have, want, tolerance=0.0):
    """The same, bit for bit or nearly."""
    is_value = {"is_leaf": lambda x: isinstance(x, js.PerReplica)}

    def same(have, want):
        assert type(have) is type(want)
        if isinstance(have, js.PerReplica):
            have, want = have.stacked, want.stacked
        np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance)

    jax.tree.map(same, have, want, **is_value)


@pytest.mark.slow
def test_optax_keeps_it_in_its_state(four, options=INT8):
    tx, grads = transformation(options), [gradients(4, seed) for seed in range(3)]
    params, state = trained(four, tx, grads)

    @four.run(options=OWN)
    def by_hand(params, state, grad):
        mean, state = replica().all_reduce_compressed("mean", grad, state, options)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, mean), state

    want, kept = PARAMS, four.compression_state(PARAMS, options)
    for grad in grads:
        want, kept = by_hand(want, kept, four.per_replica(grad))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, want)
    assert_same(compression(state).errors, kept.errors, 1e-5)
    assert np.any(kept.errors["w"].stacked)


@pytest.mark.slow
def test_a_state_is_made_for_all_replicas(four):
    tx = transformation(RANK1)
    with four.scope():
        in_scope = tx.init(PARAMS)
        in_function = jax.jit(tx.init)(PARAMS)
    built = four.init(tx.init, PARAMS)
    of_strategy = four.compression_state(PARAMS, RANK1)
    for state in map(compression, (in_scope, in_function, built, of_strategy)):
        assert state.errors["b"] is None
        assert isinstance(state.errors["w"], js.PerReplica)
        assert state.errors["w"].stacked.shape == (4, 16, 20)
        assert not np.any(state.errors["w"].stacked)
        assert state.bases["w"].shape == (20, 1)
        np.testing.assert_allclose(state.bases["w"], of_strategy.bases["w"], rtol=1e-6)
    for state in (built, of_strategy):
        versions = compression(state).errors["w"].values
        assert [v.devices() for v in versions] == [{d} for d in four.devices]
    _, state = four.run(tx.update, (four.per_replica(gradients(4)), in_function))
    assert compression(state).errors["w"].num_replicas == 4


def test_a_state_made_in_a_step_is_one_replicas(four):
    tx = transformation(INT8)

    def step(grad):
        updates, state = tx.update(grad, tx.init(PARAMS))
        return updates, compression(state).errors["w"]

    updates, error = four.run(step, (four.per_replica(gradients(4)),))
    exact = gradients(4)["w"].mean(0)
    kept = np.asarray(error.stacked).mean(0)
    np.testing.assert_allclose(updates["w"] / -0.1 + kept, exact, atol=1e-5)


def test_in_cross_replica_context_it_reduces_as_in_a_step(four):
    tx, grad = transformation(INT8), four.per_replica(gradients(4))
    want, after = four.run(tx.update, (grad, four.init(tx.init, PARAMS)), options=OWN)
    with four.scope():
        have, kept = tx.update(grad, tx.init(PARAMS))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), have, want)
    error = compression(kept).errors["w"]
    np.testing.assert_allclose(
        error.stacked, compression(after).errors["w"].stacked, atol=1e-5
    )


def test_a_skipped_step_forgets_nothing(four):
    tx = js.optax.apply_if_finite(transformation(INT8), 3)
    good, bad, last = (gradients(4, seed) for seed in range(3))
    bad["w"][2, 0, 0] = np.nan
    want, after = trained(four, transformation(INT8), [good, last])
    have, state = trained(four, tx, [good, bad, last])
    assert int(state.total_notfinite) == 1
    assert_same(compression(state).errors, compression(after).errors, 1e-5)
    assert_same(have, want, 1e-5)


@BOTH
def test_chains_with_it_pass_the_check(two, options):
    js.optax.check_chain(transformation(options), PARAMS, strategy=two)


def test_a_chain_that_clips_before_it_is_found(two):
    tx = optax.chain(optax.clip(1.0), transformation(INT8))
    with pytest.raises(ValueError, match="depends on how the gradients are spread"):
        js.optax.check_chain(tx, PARAMS, strategy=two)


def test_an_optimizer_of_nnx_cannot_keep_it(two):
    from flax import nnx

    with two.scope():
        model = nnx.Linear(16, 20, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, transformation(INT8), wrt=nnx.Param)

    @two.run
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda m: m(x).sum())(model))

    x = two.per_replica(np.ones((2, 3, 16), np.float32))
    with pytest.raises(js.errors.NotMirroredError, match=r"errors\.kernel` different"):
        step(model, optimizer, x)


@pytest.mark.slow
def test_a_restored_state_goes_on_with_the_same_bits(tmp_path, four):
    tx, grads = transformation(RANK1), [gradients(4, seed) for seed in range(4)]
    params, state = trained(four, tx, grads[:2])
    with CheckpointManager(tmp_path, four) as manager:
        manager.save(2, {"params": params, "state": state})
    want = trained(four, tx, grads[2:], state, params)
    like = {"params": PARAMS, "state": four.init(tx.init, PARAMS)}
    with CheckpointManager(tmp_path, four) as manager:
        found, _ = manager.restore_or_init(like)
    assert_same(found["state"], state)
    assert_same(trained(four, tx, grads[2:], found["state"], found["params"]), want)


def test_another_number_of_replicas_is_told_to_reduce_it(tmp_path, four, two):
    _, state = trained(four, transformation(INT8), [gradients(4)])
    state = compression(state)
    owed = np.asarray(state.errors["w"].stacked)
    with CheckpointManager(tmp_path / "each", four) as manager:
        manager.save(1, state)
    like = two.compression_state(PARAMS, INT8)
    with CheckpointManager(tmp_path / "each", two) as manager:
        message = r"(?s)PerReplica of float32\[16,20\] for 4 replicas.*reduce the value"
        with pytest.raises(MismatchError, match=message):
            manager.restore_or_init(like)
        # On the host there may be any number.
        zeros = js.PerReplica(np.zeros((4, 16, 20), np.float32))
        on_host, _ = manager.restore_or_init(
            like._replace(errors={"b": None, "w": zeros})
        )
    np.testing.assert_array_equal(on_host.errors["w"].stacked, owed)
    with CheckpointManager(tmp_path / "mean", four) as manager:
        manager.save(1, four.reduce("mean", state))
    with CheckpointManager(tmp_path / "mean", two) as manager:
        mean, _ = manager.restore_or_init(two.reduce("mean", like))
    np.testing.assert_allclose(mean.errors["w"], owed.mean(0), rtol=1e-5)
    versions = jax.tree.map(lambda e: [e] * 2, mean.errors)
    state = mean._replace(errors=two.per_replica(versions))
    grad = gradients(2)

    def step(grad, state):
        return replica().all_reduce_compressed("mean", grad, state, INT8)

    have, after = two.run(step, (two.per_replica(grad), state))
    # What four replicas owed in the mean comes from two.
    total = have["w"] + np.asarray(after.errors["w"].stacked).mean(0)
    np.testing.assert_allclose(total, grad["w"].mean(0) + owed.mean(0), atol=1e-5)


LOST = r"(?s)`compression` was .*no state.*`jaxstrategy\.optax\.all_reduce_gradients"


@BOTH
def test_without_a_place_for_what_is_not_sent_it_is_refused(four, options):
    x = four.per_replica(gradients(4)["w"])
    uses = [
        lambda: four.run(lambda x: replica().all_reduce("mean", x, options), (x,)),
        lambda: four.run(lambda x: replica().all_gather(x, 0, options), (x,)),
        lambda: four.reduce("mean", x, options=options),
        lambda: four.extended.reduce_to("mean", x, x, options),
        lambda: four.extended.batch_reduce_to("mean", [(x, x)], options),
        lambda: on(2, options=options),
        lambda: js.MultiWorkerMirroredStrategy(communication_options=options),
        lambda: js.Strategy(jax.devices()[:2], communication_options=options),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=LOST):
            use()


def test_no_other_compressions():
    for wrong in ("int4", 8, js.experimental.PowerSGD, True):
        with pytest.raises(ValueError, match="'int8', a `PowerSGD.rank=2.` or None"):
            CommunicationOptions(compression=wrong)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="`rank` was .*; at least 1 was wanted"):
            js.experimental.PowerSGD(wrong)
    for wrong in (1.5, "2", True):
        with pytest.raises(TypeError, match="`rank` was .*; a whole number was wanted"):
            js.experimental.PowerSGD(wrong)
    with pytest.raises(ValueError, match="`min_compression_rate` was 0.5; at least 1"):
        js.experimental.PowerSGD(2, 0.5)
    with pytest.raises(TypeError, match="`min_compression_rate` was '2'; a number was"):
        js.experimental.PowerSGD(2, "2")


@each_of("op", ["min", "max"])
def test_extremes_cannot_be_compressed(four, op):
    message = f"{op.upper()} cannot be compressed, .* only SUM and MEAN can"
    with pytest.raises(ValueError, match=message):
        js.optax.all_reduce_gradients(op, INT8)
    state = four.compression_state(PARAMS, INT8)
    with pytest.raises(ValueError, match=message):
        reduced(four, PARAMS, state, INT8, op)


def reduced(strategy, value, state, options, op="mean"):
    def step(value, state):
        return replica().all_reduce_compressed(op, value, state, options)

    return strategy.run(step, (value, state))


def test_states_of_something_else_are_refused(four):
    w = np.ones((16, 20), np.float32)
    state = four.compression_state(w, INT8)
    for nothing in (None, optax.EmptyState(), (state.errors, state.bases)):
        with pytest.raises(TypeError, match="a `CompressionState` was wanted"):
            reduced(four, w, nothing, INT8)
    with pytest.raises(ValueError, match="`state` was made for another tree"):
        reduced(four, {"w": w}, state, INT8)
    with pytest.raises(ValueError, match=r"`value` is float32\[300\], and `state` has"):
        reduced(four, np.ones(300, np.float32), state, INT8)
    with pytest.raises(ValueError, match=r"`value` is int32\[16,20\], and `state` has"):
        reduced(four, w.astype(np.int32), state, INT8)
    with pytest.raises(ValueError, match=r"basis of shape None .* one of \(20, 1\)"):
        reduced(four, w, state, RANK1)
    other = four.compression_state(w, RANK1)
    with pytest.raises(ValueError, match=r"basis of shape \(20, 1\) .* one of None"):
        reduced(four, w, other, INT8)
    rank2 = CommunicationOptions(compression=js.experimental.PowerSGD(2))
    with pytest.raises(ValueError, match=r"shape \(20, 1\) .* one of \(20, 2\)"):
        reduced(four, w, other, rank2)


@each_of("options", [None, CommunicationOptions()])
def test_options_without_compression_are_refused(four, options):
    with pytest.raises(ValueError, match="which have no `compression`"):
        four.compression_state(PARAMS, options)
    state = four.compression_state(PARAMS, INT8)
    with pytest.raises(ValueError, match="which have no `compression`"):
        reduced(four, PARAMS, state, options)
    with pytest.raises(TypeError, match="a `CommunicationOptions` was wanted"):
        four.compression_state(PARAMS, "int8")


@BOTH
def test_there_is_no_gradient(four, options):
    state = four.compression_state(np.ones((16, 20), np.float32), options)

    def step(x, state):
        def loss(x):
            mean, _ = replica().all_reduce_compressed("mean", x, state, options)
            return (mean**2).sum()

        return jax.grad(loss)(x)

    x = four.per_replica(gradients(4)["w"])
    with pytest.raises(NotImplementedError, match="has no gradient: what arrives is"):
        four.run(step, (x, state))


class OneByOne(js.CrossDeviceOps):
    def reduce_implementation(self, op, value, destinations, options):
        total = sum(value.values)
        return total / value.num_replicas if op is js.ReduceOp.MEAN else total


def test_operations_that_add_whole_arrays_get_none(four):
    w = np.ones((16, 20), np.float32)
    cases = {
        "add up whole arrays": js.ReductionToOneDevice(),
        "OneByOne reduces whole arrays": OneByOne(),
    }
    for message, ops in cases.items():
        strategy = on(4, ops)
        with pytest.raises(ValueError, match=f"`compression='int8'` was .*{message}"):
            reduced(strategy, w, strategy.compression_state(w, INT8), INT8)


def test_local_steps_send_nothing(two):
    state = two.compression_state(np.ones((16, 20), np.float32), INT8)

    def step(w, x):
        mean, _ = replica().all_reduce_compressed("mean", w * x, state, INT8)
        return w - mean, mean.sum()

    local = two.local_steps(step)
    x = two.per_replica(np.ones((2, 16, 20), np.float32))
    with pytest.raises(js.errors.ContextError, match="in local steps, in which each"):
        local(np.ones((16, 20), np.float32), (x, x))


@pytest.mark.slow
def test_replicas_may_keep_parts_of_the_rest(four):
    options, sharding = INT8, js.StateSharding("state", min_bytes=256)
    divided = js.MirroredStrategy(jax.devices()[:4], sharding=sharding)
    tx = transformation(options, optax.adam(0.1))
    grads = [gradients(4, seed) for seed in range(2)]
    want, _ = trained(four, tx, grads)
    state = divided.init(tx.init, PARAMS)
    error = compression(state).errors["w"]
    assert [v.devices() for v in error.values] == [{d} for d in divided.devices]
    assert isinstance(state[1][0].mu["w"], js.Sharded)
    have, after = trained(divided, tx, grads, state)
    assert isinstance(after[1][0].mu["w"], js.Sharded)
    assert isinstance(compression(after).errors["w"], js.PerReplica)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), have, want)
