"""Rows of a table in shards: lookups, changes and gradients go to the shards."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.sharded import sharded, slices

import jaxstrategy as js
from jaxstrategy.experimental import embedding_lookup

TABLE = np.arange(14, dtype=np.float32).reshape(7, 2)
CUTS = [3, 5]  # shards of 3, 2 and 2 rows


@pytest.fixture
def table(two):
    return sharded(TABLE, CUTS, two)


@pytest.mark.slow
@each_of(
    "ids",
    [[0, 6, 3], [[0, 1], [6, 6]], 4, np.array([2, 5], np.int64), np.uint8([3]), []],
)
def test_rows_are_those_of_the_whole(table, ids):
    want = TABLE[np.asarray(ids, int)]
    np.testing.assert_array_equal(embedding_lookup(table, ids), want)
    np.testing.assert_array_equal(table.sparse_read(ids), want)


@each_of("wrong", [7, -1, 1000])
def test_what_is_no_row_is_an_error(table, wrong):
    text = rf"Row {wrong} of variable 'table'.*the rows \[0, 7\)"
    for read in (partial(embedding_lookup, table), table.sparse_read):
        with pytest.raises(IndexError, match=text):
            read([0, wrong])
        with pytest.raises(IndexError, match=text):
            read(np.array([[wrong]]))
    with pytest.raises(IndexError, match=text):
        # In a trace, too, where it is known.
        jax.eval_shape(lambda: embedding_lookup(table, [wrong]))


def test_of_one_variable_and_of_an_array_it_is_the_same():
    variable = js.Variable(TABLE, name="plain")
    for given in (variable, jnp.asarray(TABLE), TABLE):
        np.testing.assert_array_equal(embedding_lookup(given, [6, 1]), TABLE[[6, 1]])
        with pytest.raises(IndexError, match=r"Row 7 of variable '\w+'"):
            embedding_lookup(given, [7])


@each_of(
    "given, ids, error, text",
    [
        (TABLE, [0.5], TypeError, "`ids` are float32.*whole numbers were wanted"),
        (TABLE, "one", TypeError, "`ids` was 'one'"),
        ([TABLE, TABLE], [0], TypeError, r"a list of 2; .*ShardedVariable\(shards\)"),
        ("table", [0], TypeError, "`params` was 'table'"),
        (np.float32(1), [0], ValueError, "`params` has no dimensions"),
    ],
)
def test_what_is_no_table_or_no_ids(given, ids, error, text):
    with pytest.raises(error, match=text):
        embedding_lookup(given, ids)


def test_traced_ids_are_neither_clamped_nor_wrapped(table):
    def read(ids):
        return embedding_lookup(table, ids)

    found = jax.jit(read)(jnp.array([-1, 7, 6, 100, 0]))
    assert np.isnan(found[jnp.array([0, 1, 3])]).all()
    np.testing.assert_array_equal(found[jnp.array([2, 4])], TABLE[[6, 0]])


@pytest.mark.slow
def test_long_rows_are_shortened():
    table = sharded(np.array([[1, 1], [0.3, 0.4], [3, 4], [0, 0]], np.float32), [2])
    found = embedding_lookup(table, [0, 1, 2, 3], max_norm=1.0)
    want = [[2**-0.5, 2**-0.5], [0.3, 0.4], [0.6, 0.8], [0, 0]]
    np.testing.assert_allclose(found, want, rtol=1e-6)
    assert table.numpy()[2].tolist() == [3, 4]
    slope = jax.grad(lambda v: embedding_lookup(v, [3, 1], max_norm=1.0).sum())(table)
    np.testing.assert_array_equal(slope.numpy()[1:, 0], [1, 0, 1])
    with pytest.raises(ValueError, match="`max_norm` was 0; more than 0 was wanted"):
        embedding_lookup(table, [0], max_norm=0)


FIVE = np.arange(1, 11, dtype=np.float32).reshape(5, 2)


@each_of(
    "choices, text",
    [
        ({"combiner": "max"}, "`combiner` was 'max'"),
        ({"weights": [1.0]}, "without a `combiner`"),
        ({"combiner": "sum", "weights": [1.0, 2.0]}, r"shape \(2,\) and `ids` \(1,\)"),
    ],
)
def test_combiners_that_cannot_be(choices, text):
    table = sharded(FIVE, [1])
    with pytest.raises(ValueError, match=text):
        embedding_lookup(table, [0], **choices)
    with pytest.raises(IndexError, match="Row 5 of variable 'table'"):
        embedding_lookup(table, [[0, 5]], combiner="sum")


def test_shards_may_be_divided_over_replicas(two):
    table = sharded(TABLE[:6], [4], two, sharding=0, aggregation="sum")
    assert not any(shard.division.is_whole for shard in table.variables)
    ids = np.array([[5, 0, 4], [1, 5, 5]])

    @two.run
    def step(ids):
        found = embedding_lookup(table, ids)
        table.scatter_add(js.IndexedSlices(jnp.ones((3, 2)), ids))
        return found

    found = two.experimental_local_results(step(two.per_replica(ids)))
    np.testing.assert_array_equal(found, TABLE[ids])
    want = TABLE[:6].copy()
    np.add.at(want, ids.ravel(), 1)
    np.testing.assert_array_equal(table.numpy(), want)


REFERENCE = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}
IDS = [6, 0, 0, 3]
VALUES = np.array([[2, 3], [4, 5], [0.5, 2], [-7, 8]], np.float32)


@each_of("word", REFERENCE)
def test_rows_change_as_those_of_the_whole(table, word):
    table.assign(want := TABLE.copy())
    REFERENCE[word](want, IDS, VALUES)
    assert getattr(table, f"scatter_{word}")(slices(IDS, VALUES)) is table
    np.testing.assert_allclose(table.numpy(), want, rtol=1e-6)


@each_of(
    "rows, error, text",
    [
        (slices([7], [[1, 1]]), IndexError, r"Row 7 of variable 'table'.*\[0, 7\)"),
        (slices([0, -1], VALUES[:2]), IndexError, "Row -1 of variable 'table'"),
        (slices([0], [[1, 1, 1]]), ValueError, r"'table' has shape \(1, 2\)"),
        (slices([0], [[1, 1]], (6, 2)), ValueError, r"an array of shape \(6, 2\)"),
        (VALUES, TypeError, "`scatter_add` of variable 'table' was given array"),
        (js.IndexedSlices(1j * VALUES[:1], np.array([0])), TypeError, "complex64"),
        (js.IndexedSlices(VALUES[:1], np.array([0.5])), TypeError, "whole numbers"),
    ],
)
def test_rows_that_do_not_fit_change_nothing(table, rows, error, text):
    with pytest.raises(error, match=text):
        table.scatter_add(rows)
    np.testing.assert_array_equal(table.numpy(), TABLE)


@each_of("aggregation", ["none", "sum", "mean", "only_first_replica"])
def test_rows_of_all_replicas_count_once(two, aggregation):
    table = sharded(TABLE, CUTS, two, aggregation=aggregation)
    ids = np.array([[6, 0], [0, 3]])
    if aggregation == "none":  # rows must be equal then
        ids[1] = ids[0]

    @two.run
    def step(ids):
        table.scatter_sub(js.IndexedSlices(jnp.ones((2, 2)), ids))

    step(two.mirror(ids[0]) if aggregation == "none" else two.per_replica(ids))
    want = TABLE.copy()
    counted = ids if aggregation in ("sum", "mean") else ids[:1]
    np.subtract.at(want, counted.ravel(), 0.5 if aggregation == "mean" else 1.0)
    np.testing.assert_array_equal(table.numpy(), want)


def test_rows_of_all_replicas_have_no_extremes(two):
    table = sharded(TABLE, CUTS, two, aggregation="sum")
    with pytest.raises(NotImplementedError, match="variable 'table', which"):
        table.scatter_max(slices([0], [[1, 1]]))


WEIGHTS = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


def loss(table, ids):
    return (embedding_lookup(table, ids) * WEIGHTS).sum()


def test_a_gradient_of_lookups_is_their_rows(table):
    value, gradient = js.value_and_grad(loss, table)(table, jnp.array([0, 6, 6]))
    assert value == (TABLE[[0, 6, 6]] * WEIGHTS).sum()
    assert isinstance(gradient, js.IndexedSlices)
    assert gradient.dense_shape == (7, 2)
    assert gradient.indices.tolist() == [0, 6, 6]
    np.testing.assert_array_equal(gradient.values, WEIGHTS)


def test_a_gradient_of_shards_has_their_own_rows(table):
    gradients = js.grad(loss, table.variables)(table, jnp.array([0, 6, 6]))
    assert [g.indices.tolist() for g in gradients] == [[0], [], [1, 1]]
    assert [g.values.tolist() for g in gradients] == [[[1, 2]], [], [[3, 4], [5, 6]]]
    assert [g.dense_shape for g in gradients] == [(3, 2), (2, 2), (2, 2)]


@pytest.mark.slow
def test_other_uses_make_it_an_array(table):
    def total():
        return loss(table, [0, 6, 6]) + (table.value() ** 2).sum()

    want = 2 * TABLE
    np.add.at(want, [0, 6, 6], WEIGHTS)
    gradient = js.grad(total, table)()
    assert isinstance(gradient, jax.Array)
    np.testing.assert_array_equal(gradient, want)
    gradients = js.grad(lambda: (table.value() ** 2).sum(), table.variables)()
    np.testing.assert_array_equal(np.concatenate(gradients), 2 * TABLE)
    assert [g.shape for g in gradients] == [(3, 2), (2, 2), (2, 2)]


def test_the_gradient_of_an_unused_table_has_no_rows(table):
    w = js.Variable(2.0)
    gradients = js.grad(lambda: w**2, (w, table))()
    assert gradients[0] == 4
    assert gradients[1].indices.shape == (0,) and gradients[1].dense_shape == (7, 2)


def test_gradients_of_shards_in_a_step_have_room_for_all_rows(two):
    table = sharded(TABLE, CUTS, two)

    @two.run
    def step(ids):
        gradients = js.grad(loss, table.variables)(table, ids)
        assert [g.indices.shape for g in gradients] == [(3,)] * 3
        return [g.to_dense() for g in gradients]

    ids = np.array([[0, 6, 6], [2, 6, 4]])
    found = two.experimental_local_results(step(two.per_replica(ids)))
    for own, rows in zip(found, ids, strict=True):
        want = np.zeros_like(TABLE)
        np.add.at(want, rows, WEIGHTS)
        np.testing.assert_array_equal(np.concatenate(own), want)


def test_no_array_of_the_tables_size_is_made():
    table = sharded(np.ones((4096, 2)), [2048])

    def step(ids):
        return js.grad(lambda: (embedding_lookup(table, ids) ** 2).sum(), table)()

    jaxpr = jax.make_jaxpr(step)(jnp.array([1, 4000])).jaxpr
    # What is read of a variable is no more than what it holds.
    others = [each for each in equations(jaxpr) if each.primitive.name != "get"]
    made = [var.aval.shape for each in others for var in each.outvars]
    assert made and not [shape for shape in made if shape[:1] in ((2048,), (4096,))]


def equations(jaxpr):
    """All equations, those inside others too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from equations(value.jaxpr)


def test_row_numbers_of_gradients_have_64_bits_if_there_are_so_many_rows():
    with jax.enable_x64(True):
        # Rows without elements take no memory, however many there are.
        parts = [jnp.zeros((length, 0), jnp.float32) for length in (2**31, 8)]
        table = js.experimental.ShardedVariable(list(map(js.Variable, parts)))
        ids = [2**31 + 3, 5, 2**31 + 7]
        gradient = js.grad(lambda: table.sparse_read(ids).sum(), table)()
        assert gradient.indices.dtype == np.int64
        np.testing.assert_array_equal(gradient.indices, ids)
        with pytest.raises(IndexError, match=r"Row 2147483656 .*\[0, 2147483656\)"):
            table.sparse_read([2**31 + 8])
