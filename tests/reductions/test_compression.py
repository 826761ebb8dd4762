"""What a compressed reduction sends, what arrives, and where the rest is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from helpers.reductions import collectives, on
from helpers.replicas import replica

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager, MismatchError
from jaxstrategy.experimental import CommunicationOptions

# Tests that share a strategy define the same step anew.
pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxstrategy.errors.RecompilationWarning"
)

INT8 = CommunicationOptions(compression="int8")
RANK2 = CommunicationOptions(compression=js.experimental.PowerSGD(rank=2))
PAIRS = [[0, 1], [2, 3]]
LEVELS = CommunicationOptions(
    compression="int8", implementation="hierarchical", groups=PAIRS
)


def reducer(strategy, options):
    """A step from values and a state to results, equal on all, and the next state."""

    @strategy.run(options=js.RunOptions(expect_mirrored=(True, False)))
    def step(value, state):
        return replica().all_reduce_compressed("mean", value, state, options)

    return step


def stacked(error):
    """The errors of all replicas, `[replica, ...]`."""
    return np.asarray(
        error.stacked if isinstance(error, js.PerReplica) else error[None]
    )


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def once(strategy, options, value):
    """One reduction of `[replica, ...]`, with nothing owed before."""
    like = jax.tree.map(lambda x: x[0], value)
    state = strategy.compression_state(like, options)
    return reducer(strategy, options)(strategy.per_replica(value), state)


def rounding(x):
    """How far 8-bit numbers can be from `x`, `[n]`, whatever block a number is in."""
    return np.abs(x).max() / 127 / 2


@each_of("options", [INT8, LEVELS])
def test_a_sum_in_eight_bits_is_near_and_the_rest_is_kept(four, options):
    x = normal(4, 7, 101)
    have, state = once(four, options, x)
    exact = x.mean(0)
    # One rounding by each replica, and one of the mean.
    bound = sum(map(rounding, x)) / 4 + rounding(have)
    assert 0 < np.abs(have - exact).max() < bound
    assert have.dtype == np.float32 and have.shape == (7, 101)
    owed = stacked(state.errors).mean(0)
    np.testing.assert_allclose(have + owed, exact, atol=1e-5)
    assert state.bases is None


def test_what_was_kept_goes_with_the_next(four):
    step, zeros = reducer(four, INT8), four.per_replica(np.zeros((4, 700), np.float32))
    x = normal(4, 700)
    state = four.compression_state(x[0], INT8)
    arrived, state = step(four.per_replica(x), state)
    for _ in range(4):
        more, state = step(zeros, state)
        arrived += more
    np.testing.assert_allclose(arrived, x.mean(0), atol=1e-6)


def test_a_quarter_of_the_bytes_crosses_the_network():
    eight = on(8)
    x = normal(8, 64, 1024)
    size = 4 * 64 * 1024
    args = eight.per_replica(x), eight.compression_state(x[0], INT8)
    found = collectives(eight, reducer(eight, INT8), *args)
    # All parts but one's own go out, and one's own sum comes from each of the others.
    (scatter, _, parts), (gather, _, part) = found
    assert (scatter, gather) == ("all_to_all", "all_gather")
    assert {kind for _, kind, _ in found} == {"int8"}
    assert parts == 8 * part
    assert 0.25 * size < parts < 0.26 * size


def test_whole_numbers_stay_inside_groups_of_near_replicas(four):
    x = normal(4, 32, 64)
    args = four.per_replica(x), four.compression_state(x[0], LEVELS)
    found = four.explain(reducer(four, LEVELS), args, compiled=False).collectives
    wire = [(each.kind, *each.dtypes, each.nbytes) for each in found]
    # Of 2048 numbers a half goes between the pairs, of it each sums a half: a scale of
    # 4 bytes for 256 numbers.
    assert wire == [
        ("reduce_scatter", "float32", 8192),
        ("all_to_all", "int8", 1024 + 16),
        ("all_gather", "int8", 512 + 8),
        ("all_gather", "float32", 4096),
    ]
    assert {each.group for each in found} == {2}


def test_one_group_sends_all_bits():
    three = on(3)  # which no two groups can share
    options = CommunicationOptions(compression="int8", implementation="hierarchical")
    x = normal(3, 300)
    have, state = once(three, options, x)
    np.testing.assert_allclose(have, x.mean(0), rtol=1e-5, atol=1e-6)
    assert not stacked(state.errors).any()


def power_sgd(x, start, steps):
    """What arrives in each step of gradients `[replica, rows, columns]`, by NumPy."""
    errors, basis = np.zeros_like(x), start
    multiples = np.arange(start.size) * 0x9E3779B9 % 2**32 / 2**32 - 0.5
    even = multiples.reshape(start.shape) * np.sqrt(12 / len(start))
    for _ in range(steps):
        owed = x + errors
        span, _ = np.linalg.qr((owed @ (basis + 0.01 * even)).mean(0))
        own = np.swapaxes(owed, 1, 2) @ span
        mean = own.mean(0)
        basis = mean / np.linalg.norm(mean, axis=0)
        errors = owed - span @ np.swapaxes(own, 1, 2)
        yield span @ mean.T, errors


def test_thin_matrices_are_those_of_a_plain_loop(four):
    options = CommunicationOptions(compression=js.experimental.PowerSGD(3))
    x = normal(4, 2, 15, 20)  # the last dimension is that of the columns
    state = four.compression_state(x[0], options)
    assert state.bases.shape == (20, 3)
    matrices, basis = x.reshape(4, 30, 20), np.asarray(state.bases, np.float64)
    oracle = power_sgd(matrices.astype(np.float64), basis, 4)
    step, x = reducer(four, options), four.per_replica(x)
    for want, errors in oracle:
        have, state = step(x, state)
        np.testing.assert_allclose(have, want.reshape(2, 15, 20), atol=1e-4)
        owed = stacked(state.errors).reshape(4, 30, 20)
        np.testing.assert_allclose(owed, errors, atol=1e-4)
        assert isinstance(state.bases, js.Mirrored)


def test_thin_matrices_are_what_crosses_the_network(four):
    tree = {"w": normal(4, 64, 100), "b": normal(4, 100)}
    like = jax.tree.map(lambda x: x[0], tree)
    args = four.per_replica(tree), four.compression_state(like, RANK2)
    found = collectives(four, reducer(four, RANK2), *args)
    # What is exact goes with the first.
    assert found == [
        ("psum", "float32", 4 * (2 * 64 + 100)),
        ("psum", "float32", 4 * 2 * 100),
    ]


def test_gradients_of_rare_sizes_neither_vanish_nor_overflow(four):
    for size in (1e-25, 1e25):
        x = (normal(4, 24, 1) @ normal(1, 24, seed=1) * size).astype(np.float32)
        state = four.compression_state(x[0], RANK2)
        step = reducer(four, RANK2)
        for _ in range(2):
            have, state = step(four.per_replica(x), state)
        np.testing.assert_allclose(have, x.mean(0), atol=1e-4 * size)


BOTH = each_of("options", [INT8, RANK2])


def test_all_else_is_exact(four):
    tree = {
        "complex": (normal(4, 32, 32) + 1j * normal(4, 32, 32)).astype(np.complex64),
        "empty": normal(4, 0, 3),
        "n": np.random.default_rng(0).integers(-50, 50, (4, 32, 32)),
        "scalar": normal(4),
        "small": normal(4, 3, 5),
        "w": normal(4, 32, 32),
    }
    have, state = once(four, INT8, tree)
    for name, versions in tree.items():
        if name != "w":
            exact = versions.mean(0)
            assert have[name].dtype == (np.float32 if name == "n" else exact.dtype)
            np.testing.assert_allclose(have[name], exact, rtol=1e-5, atol=1e-6)
            assert state.errors[name] is None and state.bases[name] is None
    assert state.errors["w"].shape == (32, 32)


@pytest.mark.slow
@BOTH
def test_short_numbers_are_remembered_in_32_bits(four, options):
    x = (normal(4, 32, 1) @ normal(1, 32, seed=1)).astype(jnp.bfloat16)
    have, state = once(four, options, x)
    assert have.dtype == jnp.bfloat16 and state.errors.dtype == np.float32
    exact = np.asarray(x, np.float32).mean(0)
    np.testing.assert_allclose(np.asarray(have, np.float32), exact, atol=0.05)


@pytest.mark.slow
@BOTH
def test_what_is_not_finite_shows_and_spoils_no_memory(four, options):
    x = normal(4, 32, 64)
    state = four.compression_state(x[0], options)
    step = reducer(four, options)
    _, before = step(four.per_replica(x), state)
    spoiled = x.copy()
    spoiled[2, 3, 4] = np.nan
    have, after = step(four.per_replica(spoiled), before)
    assert not np.isfinite(have[3, 4])
    lost = ~np.isfinite(np.asarray(have))
    # One block of 256 numbers, or the whole matrix.
    assert lost.sum() == (256 if options is INT8 else x[0].size)
    owed = stacked(after.errors)
    assert np.isfinite(owed).all()
    np.testing.assert_array_equal(owed[:, lost], stacked(before.errors)[:, lost])
    if options is RANK2:
        np.testing.assert_array_equal(after.bases, before.bases)
    have, _ = step(four.per_replica(x), after)
    assert np.isfinite(have).all()


def test_one_replica_sends_nothing_and_what_others_left_behind():
    one = on(1)
    x = normal(1, 32, 16)
    for options in (INT8, RANK2):
        have, state = once(one, options, x)
        np.testing.assert_array_equal(have, x[0])
        assert isinstance(state.errors, jax.Array) and not state.errors.any()
    state = one.compression_state(np.zeros(300, np.float32), INT8)
    owed, step = normal(300), reducer(one, INT8)
    have, state = step(np.ones(300, np.float32), state._replace(errors=owed))
    np.testing.assert_allclose(have, 1 + owed, rtol=1e-6)
    assert not state.errors.any()


@BOTH
def test_sparse_gradients_stay_sparse(four, options):
    def step(rows, state):
        slices = js.IndexedSlices(rows, jnp.arange(2), (32, 32))
        return replica().all_reduce_compressed("sum", {"e": slices}, state, options)

    state = four.compression_state({"e": np.zeros((32, 32), np.float32)}, options)
    rows = normal(4, 2, 32)
    have, after = four.run(step, (four.per_replica(rows), state))
    np.testing.assert_allclose(have["e"].values, rows.reshape(8, 32), rtol=1e-6)
    assert not stacked(after.errors["e"]).any()


# Where what was not sent is kept: in steps, in Optax, on disk; and what is refused.

RANK1 = CommunicationOptions(compression=js.experimental.PowerSGD(rank=1))
EACH = each_of("options", [INT8, RANK1])
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


def test_a_skipped_step_forgets_nothing(four):
    tx = js.optax.apply_if_finite(transformation(INT8), 3)
    good, bad, last = (gradients(4, seed) for seed in range(3))
    bad["w"][2, 0, 0] = np.nan
    want, after = trained(four, transformation(INT8), [good, last])
    have, state = trained(four, tx, [good, bad, last])
    assert int(state.total_notfinite) == 1
    assert_same(compression(state).errors, compression(after).errors, 1e-5)
    assert_same(have, want, 1e-5)


@EACH
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


@EACH
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


@EACH
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


def test_operations_that_add_whole_arrays_get_none():
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
