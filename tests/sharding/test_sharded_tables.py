"""Tables of which replicas have some rows each: the numbers of whole tables.

Each test runs under a strategy that keeps tables whole and under one that divides them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js

EVERYTHING = js.StateSharding("state", min_bytes=0)


def strategy_of(replicas, divides):
    sharding = EVERYTHING if divides else None
    return js.MirroredStrategy(jax.devices()[:replicas], sharding=sharding)


@pytest.fixture(params=[False, True], ids=["whole", "divided"])
def four(request):
    return strategy_of(4, request.param)


@pytest.fixture(params=[False, True], ids=["whole", "divided"])
def eight(request):
    return strategy_of(8, request.param)


def table_of(rows):
    """Row i is [i, 10 i]."""
    return np.arange(rows, dtype=np.float32)[:, None] * np.float32([1, 10])


def test_ids_of_any_shape_and_of_no_row(four):
    table = four.mirror(table_of(8))

    @four.run
    def step(table, ids):
        return js.sharded.lookup(table, ids)

    ids = np.random.default_rng(0).integers(-2, 10, (4, 2, 3, 2))
    rows = step(table, four.per_replica(ids))
    known = table_of(8)[ids % 8]
    known[ids < 0] = 0
    known[ids >= 8] = np.nan
    np.testing.assert_array_equal(rows.stacked, known)


@pytest.mark.slow
@each_of("combiner", ["sum", "mean", "sqrtn"])
def test_weights_and_their_gradients_are_those_of_a_loop(combiner):
    table = np.random.default_rng(0).normal(size=(10, 2)).astype(np.float32)
    ids = np.array([[0, 4, 4], [3, -1, -1], [-1, -1, -1]])
    weights = np.float32([[0.5, 2, 1], [3, 7, 7], [1, 1, 1]])

    def plainly(table, weights):
        groups = []
        for group, weight in zip(ids, weights, strict=True):
            pairs = [(i, w) for i, w in zip(group, weight, strict=True) if i >= 0]
            total = sum((w * table[i] for i, w in pairs), jnp.zeros(2))
            if pairs and combiner == "mean":
                total = total / sum(w for _, w in pairs)
            if pairs and combiner == "sqrtn":
                total = total / jnp.sqrt(sum(w**2 for _, w in pairs))
            groups.append(total)
        return jnp.stack(groups)

    def ours(table, weights):
        return js.sharded.lookup(table, ids, combiner, weights=weights)

    def with_gradients(lookup):
        def loss(table, weights):
            rows = lookup(table, weights)
            return (rows**2).sum(), rows

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(table, weights)

    found, wanted = with_gradients(ours), with_gradients(plainly)
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_tables_of_whole_numbers_and_of_16_bits():
    table = np.array([[1, 2], [4, 5]])
    np.testing.assert_array_equal(js.sharded.lookup(table, [1, -1]), [[4, 5], [0, 0]])
    sums = js.sharded.lookup(table, [[0, 1]], "sum")
    assert sums.dtype == jnp.int32
    np.testing.assert_array_equal(sums, [[5, 7]])
    means = js.sharded.lookup(table, [[0, 1]], "mean")
    np.testing.assert_array_equal(means, [[2.5, 3.5]])
    half = jnp.ones((2, 2), "bfloat16")
    many = js.sharded.lookup(half, np.zeros((1, 300), int), "mean")
    assert many.dtype == half.dtype
    np.testing.assert_array_equal(many.astype("float32"), [[1, 1]])


def test_ids_of_64_bits_do_not_wrap():
    with jax.enable_x64(True):
        ids = jnp.asarray([2**32 + 1, 1, -(2**32) + 1], "int64")
        rows = js.sharded.lookup(jnp.arange(4.0), ids)
        np.testing.assert_array_equal(rows, [np.nan, 1, 0])


def test_lookups_in_transformations():
    table = jnp.asarray(table_of(8))
    ids = np.array([[1, 2, 2], [7, 0, -1]])
    wanted = js.sharded.lookup(table, ids)

    def row_by_row(ids):
        return js.sharded.lookup(table, ids)

    np.testing.assert_array_equal(jax.vmap(row_by_row)(jnp.asarray(ids)), wanted)
    columns = jax.vmap(row_by_row, in_axes=1, out_axes=1)(jnp.asarray(ids))
    np.testing.assert_array_equal(columns, wanted)
    np.testing.assert_array_equal(jax.jit(row_by_row)(ids), wanted)

    def total(ids):
        return jax.grad(lambda table: js.sharded.lookup(table, ids).sum())(table)

    times = np.zeros((2, 8, 2))
    for group, row in np.argwhere(ids >= 0):
        times[group, ids[group, row]] += 1
    np.testing.assert_array_equal(jax.vmap(total)(jnp.asarray(ids)), times)


@pytest.mark.slow
def test_derivatives_of_every_order_and_direction():
    table = np.random.default_rng(0).normal(size=(24, 2)).astype(np.float32)
    ids = jnp.array([5, 5, -1, 0, 3])

    def cubes(table):
        return (js.sharded.lookup(table, ids) ** 3).sum()

    @jax.jit
    def derivatives(table):
        first = jax.grad(cubes)(table)
        second = jax.grad(lambda table: jax.grad(cubes)(table).sum())(table)
        _, tangent = jax.jvp(cubes, (table,), (jnp.ones_like(table),))
        many = jax.vmap(jax.grad(cubes))(jnp.stack([table, 2 * table]))
        return first, second, tangent, many

    times = np.zeros((24, 1))
    times[[0, 3, 5]] = [[1], [1], [2]]
    first, second, tangent, many = derivatives(table)
    np.testing.assert_allclose(first, times * 3 * table**2, rtol=1e-6)
    np.testing.assert_allclose(second, times * 6 * table, rtol=1e-6)
    np.testing.assert_allclose(tangent, first.sum(), rtol=1e-5)
    np.testing.assert_allclose(many[1], 4 * many[0], rtol=1e-5)


def mean_gradient(strategy, table, ids, op="mean"):
    """The gradient of the sum of what each replica looks up, reduced."""

    @strategy.run
    def step(table, ids):
        def total(table):
            return js.sharded.lookup(table, ids).sum()

        return js.get_replica_context().all_reduce(op, jax.grad(total)(table))

    return step(table, strategy.per_replica(ids))


def test_what_is_no_row_has_no_gradient(four):
    ids = np.tile([-1, 8, 3, -7, 100], (4, 1))
    wanted = np.zeros((8, 2))
    wanted[3] = 1
    gradient = mean_gradient(four, four.mirror(table_of(8)), ids)
    np.testing.assert_array_equal(gradient, wanted)


def test_all_ids_of_one_owner_lose_no_row(eight):
    table = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    ids = np.random.default_rng(1).integers(0, 8, (8, 50))  # the first replica's rows

    @eight.run
    def step(table, ids):
        return js.sharded.lookup(table, ids)

    rows = step(eight.mirror(table), eight.per_replica(ids))
    np.testing.assert_array_equal(rows.stacked, table[ids])
