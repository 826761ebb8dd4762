"""Each collective of replicas that share devices, against NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids, replica
from jax import lax

import jaxstrategy as js

AXIS = "replica"
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
ACROSS = [[0, 4], [1, 5], [2, 6], [3, 7]]
HALVES = [[0, 2, 4, 6], [7, 5, 3, 1]]


def stacked(tree):
    is_own = lambda x: isinstance(x, js.PerReplica)  # noqa: E731
    return jax.tree.map(
        lambda x: (
            np.asarray(x.stacked)
            if is_own(x)
            else np.broadcast_to(np.asarray(x), (8, *x.shape))
        ),
        tree,
        is_leaf=is_own,
    )


def test_reductions_of_the_context(eight):
    grouped = {"pairs": PAIRS, "across": ACROSS, "halves": HALVES}
    functions = {"sum": np.sum, "mean": np.mean, "max": np.max}

    @eight.run
    def step(x):
        def reduced(groups):
            reduce = replica().all_reduce
            return {op: reduce(op, x, groups=groups) for op in functions}

        return (
            {name: reduced(groups) for name, groups in grouped.items()},
            {op.name: replica().all_reduce(op, x) for op in js.ReduceOp},
            replica().all_gather(x[None], 0),
            replica().all_gather(x[None, None], 1),
        )

    reduced, whole, first, second = stacked(step(ids(eight)))
    x = np.arange(8.0)
    for op, number in {"SUM": 28, "MEAN": 3.5, "MIN": 0, "MAX": 7}.items():
        np.testing.assert_array_equal(whole[op], np.full(8, number))
    for name, groups in grouped.items():
        for op, function in functions.items():
            wanted = np.zeros(8)
            for group in groups:
                wanted[group] = function(x[group])
            np.testing.assert_array_equal(reduced[name][op], wanted)
    np.testing.assert_array_equal(first, np.tile(x, (8, 1)))
    np.testing.assert_array_equal(second, np.tile(x, (8, 1, 1)))


# Of all replicas' arrays `[replica, ...]`, what each has afterwards.


def gathered(x, groups, axis, tiled):
    found = np.zeros((8,)).tolist()
    for group in groups:
        for i in group:
            rows = [x[j] for j in group]
            found[i] = np.concatenate(rows, axis) if tiled else np.stack(rows, axis)
    return np.stack(found)


def scattered(x, groups, axis, tiled):
    found = np.zeros((8,)).tolist()
    for group in groups:
        total = sum(x[j] for j in group)
        parts = np.split(total, len(group), axis)
        for place, i in enumerate(group):
            found[i] = parts[place] if tiled else parts[place].squeeze(axis)
    return np.stack(found)


def exchanged(x, groups, split, concat, tiled):
    found = np.zeros((8,)).tolist()
    for group in groups:
        for place, i in enumerate(group):
            parts = [np.split(x[j], len(group), split)[place] for j in group]
            if tiled:
                found[i] = np.concatenate(parts, concat)
            else:
                found[i] = np.stack([p.squeeze(split) for p in parts], concat)
    return np.stack(found)


ALL = [list(range(8))]


@pytest.mark.slow
@each_of("devices", [1, 2])
def test_collectives_of_jax(devices):
    each = 8 // devices
    eight = js.MirroredStrategy(jax.devices()[:devices], replicas_per_device=each)
    rng = np.random.default_rng(2)
    given = {
        name: rng.integers(-9, 9, size=(8, size, 2 * size)).astype(np.float32)
        for name, size in {"all": 8, "pairs": 2, "across": 2, "halves": 4}.items()
    }
    members = {"all": None, "pairs": PAIRS, "across": ACROSS, "halves": HALVES}

    def of(x, **groups):
        return {
            "psum": lax.psum(x, AXIS, **groups),
            "pmax": lax.pmax(x, AXIS, **groups),
            "pmin": lax.pmin(x, AXIS, **groups),
            "gather": lax.all_gather(x, AXIS, axis=1, **groups),
            "gather tiled": lax.all_gather(x, AXIS, axis=1, tiled=True, **groups),
            "scatter": lax.psum_scatter(x, AXIS, **groups),
            "scatter tiled": lax.psum_scatter(
                x, AXIS, scatter_dimension=1, tiled=True, **groups
            ),
            "exchange": lax.all_to_all(x, AXIS, 0, 1, **groups),
            "exchange back": lax.all_to_all(x.T, AXIS, 1, 0, **groups),
            "exchange tiled": lax.all_to_all(x, AXIS, 1, 0, tiled=True, **groups),
        }

    def step(arrays):
        return {
            name: of(x, axis_index_groups=members[name]) for name, x in arrays.items()
        }

    everything = stacked(
        eight.run(step, ({n: js.PerReplica(x) for n, x in given.items()},))
    )
    for name, found in everything.items():
        x, groups = given[name], members[name] or ALL
        wanted = {
            "gather": gathered(x, groups, 1, False),
            "gather tiled": gathered(x, groups, 1, True),
            "scatter": scattered(x, groups, 0, False),
            "scatter tiled": scattered(x, groups, 1, True),
            "exchange": exchanged(x, groups, 0, 1, False),
            "exchange back": exchanged(x.transpose(0, 2, 1), groups, 1, 0, False),
            "exchange tiled": exchanged(x, groups, 1, 0, True),
        }
        for op, function in {"psum": np.sum, "pmax": np.max, "pmin": np.min}.items():
            wanted[op] = np.zeros_like(x)
            for group in groups:
                wanted[op][group] = function(x[group], axis=0)
        assert found.keys() == wanted.keys()
        for op, array in wanted.items():
            np.testing.assert_array_equal(found[op], array, err_msg=f"{op} {name}")


def test_groups_of_other_sizes(eight):
    groups = [[0, 5], [1, 2, 3, 4, 6, 7]]

    def step(x):
        return tuple(
            collective(x, AXIS, axis_index_groups=groups)
            for collective in (lax.psum, lax.pmax, lax.pmin)
        )

    total, largest, smallest = stacked(eight.run(step, (ids(eight, 1.0),)))
    is_first = np.isin(np.arange(8), [0, 5])
    np.testing.assert_array_equal(total, np.where(is_first, 7, 29))
    np.testing.assert_array_equal(largest, np.where(is_first, 6, 8))
    np.testing.assert_array_equal(smallest, np.where(is_first, 1, 2))


def test_collectives_that_send(eight):
    def step(x):
        return (
            lax.ppermute(x, AXIS, [(i, (i + 3) % 8) for i in range(8)]),
            lax.ppermute(x + 1, AXIS, [(0, 5), (6, 0)]),
            lax.pbroadcast(x, (AXIS,), 6),
            lax.pswapaxes(jnp.arange(8.0) + 10 * x, AXIS, 0),
        )

    ring, some, one, swapped = stacked(eight.run(step, (ids(eight),)))
    np.testing.assert_array_equal(ring, np.roll(np.arange(8), 3))
    np.testing.assert_array_equal(some, [7, 0, 0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(one, np.full(8, 6))
    np.testing.assert_array_equal(
        swapped, np.arange(8)[:, None] + 10 * np.arange(8)[None]
    )


@each_of(
    ("collective", "kind", "shape"),
    [
        # A device sends one sum of its lanes, and gets the parts of its lanes.
        (lambda x: lax.psum_scatter(x, AXIS, tiled=True), "reduce-scatter", [4, 2, 3]),
        (lambda x: lax.psum_scatter(x[:8], AXIS), "reduce-scatter", [4, 3]),
        # A device sends the arrays of its lanes, once.
        (lambda x: lax.all_gather(x, AXIS), "all-gather", [2, 4, 16, 3]),
        (lambda x: replica().all_gather(x, 0), "all-gather", [2, 4, 16, 3]),
        (lambda x: lax.psum(x, AXIS), "all-reduce", [16, 3]),
        (lambda x: lax.pmax(x, AXIS), "all-reduce", [16, 3]),
    ],
)
def test_a_device_sends_once_for_its_lanes(collective, kind, shape):
    strategy = js.MirroredStrategy(jax.devices()[:2], replicas_per_device=4)
    x = js.PerReplica(np.zeros((8, 16, 3), np.float32))
    run = jax.jit(lambda x: strategy.run(lambda x: collective(x) + x.sum(), (x,)))
    text = run.lower(x).compile().as_text()
    shapes = "f32[" + ",".join(map(str, shape)) + "]"
    sent = re.findall(r"= (\S+?)(?:\{\S*)? ((?:all|reduce|collective)-[a-z-]+)\(", text)
    assert sent == [(shapes, kind)]


@pytest.mark.slow
def test_scattered_sums_of_numbers_of_other_kinds(eight):
    """Also of what is the same on all replicas, and their derivatives."""
    x = np.random.default_rng(0).integers(-9, 9, (8, 16, 3)).astype(np.float32)

    def step(x, same):
        def scattered(x, axis=0, tiled=True):
            return lax.psum_scatter(x, AXIS, scatter_dimension=axis, tiled=tiled)

        by_column = scattered(x.T[:, :8], 1, False)
        kinds = [scattered(x.astype(t)) for t in ("int32", "bfloat16", "float32")]
        weights = 1.0 + replica().replica_id_in_sync_group
        back = jax.grad(lambda x: (scattered(x) * weights).sum())(x)
        return kinds, by_column, scattered(same), scattered(jnp.ones(8)), back

    same = np.arange(16, dtype=np.float32)
    kinds, by_column, of_same, ones, back = stacked(
        eight.run(step, (js.PerReplica(x), eight.mirror(same)))
    )
    for each in kinds:
        np.testing.assert_array_equal(each, x.sum(0).reshape(8, 2, 3))
    np.testing.assert_array_equal(by_column, x.sum(0)[:8])
    np.testing.assert_array_equal(of_same, 8 * same.reshape(8, 2))
    np.testing.assert_array_equal(ones, np.full((8, 1), 8))
    wanted = np.broadcast_to(np.repeat(np.arange(1.0, 9.0), 2)[:, None], (8, 16, 3))
    np.testing.assert_array_equal(back, wanted)

    def outside(x):
        scatter = lambda x: lax.psum_scatter(x, AXIS, tiled=True)  # noqa: E731
        return (eight.run(scatter, (js.PerReplica(x),)).stacked ** 2).sum()

    wanted = np.broadcast_to(2 * x.sum(0), x.shape)
    np.testing.assert_allclose(jax.grad(outside)(jnp.asarray(x)), wanted)


def test_sizes_and_kinds(eight):
    def step(x):
        return (
            lax.axis_size(AXIS),
            lax.psum(1, AXIS),
            lax.psum(x.astype(jnp.complex64) * 1j, AXIS),
            lax.pmax(x.astype(jnp.bfloat16), AXIS),
            lax.psum(jnp.ones(2, bool), AXIS),
            lax.psum(jnp.full(2, 100, jnp.int8), AXIS),
            lax.psum(jnp.zeros((0, 3)), AXIS),
        )

    size, count, number, largest, trues, wrapped, empty = eight.run(step, (ids(eight),))
    assert (size, count, complex(number), float(largest)) == (8, 8, 28j, 7)
    np.testing.assert_array_equal(trues, [8, 8])
    np.testing.assert_array_equal(wrapped, np.full(2, 800).astype(np.int8))
    assert empty.shape == (0, 3)


def test_collectives_under_a_users_vmap(eight):
    def step(x):
        rows = jnp.arange(16.0).reshape(2, 8)

        def mapped(function):
            return jax.vmap(function, axis_name="rows")(rows)

        both = (AXIS, "rows")
        return (
            mapped(lambda y: lax.psum_scatter(y + x, AXIS, tiled=True)),
            mapped(lambda y: lax.psum(y[0] + x, both)),
            mapped(lambda y: lax.pmax(y[0] + x, both)),
            mapped(lambda y: y[0] + lax.axis_index(both)),
        )

    parts, total, largest, index = stacked(eight.run(step, (ids(eight),)))
    rows = np.arange(16.0).reshape(2, 8)
    np.testing.assert_array_equal(parts[:, :, 0], (8 * rows + 28).T)
    np.testing.assert_array_equal(total, np.full((8, 2), 2 * 28 + 8 * 8))
    np.testing.assert_array_equal(largest, np.full((8, 2), 15))
    np.testing.assert_array_equal(index, np.arange(16).reshape(8, 2) + [0, 8])


@pytest.mark.slow
def test_collectives_in_loops_and_branches(eight):
    def step(x):
        def turn(carry, y):
            return carry + lax.psum(x * y, AXIS), lax.pmean(carry + x, AXIS)

        scanned = lax.scan(turn, 0.0, jnp.arange(3.0))
        most = lax.pmax(x, AXIS)
        while_ = lax.while_loop(lambda c: lax.pmax(c, AXIS) < 50, lambda c: c + most, x)
        branch = lax.cond(most > 3, lambda: lax.psum(x, AXIS), lambda: x * 0)
        again = jax.checkpoint(lambda x: lax.psum(x * x, AXIS))(x)
        return scanned, while_, branch, again

    (total, means), while_, branch, again = stacked(eight.run(step, (ids(eight),)))
    np.testing.assert_array_equal(total, np.full(8, 28 * 3))
    np.testing.assert_array_equal(means, np.tile([3.5, 3.5, 31.5], (8, 1)))
    np.testing.assert_array_equal(while_, 49 + np.arange(8))
    np.testing.assert_array_equal(branch, np.full(8, 28))
    np.testing.assert_array_equal(again, np.full(8, 140))


def test_groups_that_decide_alike(eight):
    """A loop that the first four leave before the others, and a branch of theirs."""
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def step(x):
        def total(value):
            return replica().all_reduce("sum", value, groups=groups)

        limit = total(x)  # 6, 22
        each_of = lax.while_loop(
            lambda c: c < limit, lambda c: c + total(jnp.ones_like(c)), 0.0
        )
        branch = lax.cond(limit > 10, lambda: total(2 * x), lambda: x)
        return each_of, branch

    each_of, branch = stacked(eight.run(step, (ids(eight),)))
    np.testing.assert_array_equal(each_of, [8] * 4 + [24] * 4)
    np.testing.assert_array_equal(branch, [0, 1, 2, 3, 44, 44, 44, 44])


def test_a_collective_without_a_rule_is_refused(eight):
    def step(x):
        numbers = jnp.zeros(8, jnp.int32)
        return lax.ragged_all_to_all(
            jnp.full(8, x), jnp.zeros(8), numbers, numbers, numbers, numbers,
            axis_name=AXIS,
        )  # fmt: skip

    with pytest.raises(NotImplementedError, match="(?s)`ragged_all_to_all`, which has"):
        eight.run(step, (ids(eight),))
