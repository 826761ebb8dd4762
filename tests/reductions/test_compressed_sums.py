"""What a compressed reduction sends, what arrives, and what it keeps for the next."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.reductions import collectives, on
from helpers.replicas import replica

import jaxstrategy as js
from jaxstrategy.experimental import CommunicationOptions

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


@pytest.mark.slow
@each_of("first", ["zeros", "other rows and columns"])
def test_power_iteration_goes_on_from_elsewhere(four, first):
    options = CommunicationOptions(compression=js.experimental.PowerSGD(1))
    before, x = np.zeros((4, 16, 16), np.float32), np.zeros((4, 16, 16), np.float32)
    if first != "zeros":
        before[:, 0, 0] = 1.0
    x[:, 7, 5] = 3.0
    state = four.compression_state(x[0], options)
    step = reducer(four, options)
    for _ in range(3):
        _, state = step(four.per_replica(before), state)
    have, state = step(four.per_replica(x), state)
    np.testing.assert_allclose(have, x[0], atol=1e-5)


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


@pytest.mark.slow
def test_arrays_are_joined_as_the_options_say(four):
    tree = [normal(4, 300), normal(4, 500)]
    like = [x[0] for x in tree]
    for size, packs in ((1, 2), (2**20, 1)):
        options = CommunicationOptions(bytes_per_pack=size, compression="int8")
        args = (
            four.per_replica(tuple(tree)),
            four.compression_state(tuple(like), options),
        )
        found = collectives(four, reducer(four, options), *args)
        assert len(found) == 2 * packs
        have, state = reducer(four, options)(*args)
        for x, mean, error in zip(tree, have, state.errors, strict=True):
            exact = x.mean(0)
            np.testing.assert_allclose(mean + stacked(error).mean(0), exact, atol=1e-6)
