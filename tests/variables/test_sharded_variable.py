"""A table in shards is used as one variable of the shape of all."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.sharded import sharded, slices

import jaxstrategy as js
from jaxstrategy.experimental import ShardedVariable

TABLE = np.arange(8, dtype=np.float32).reshape(4, 2)
CUTS = [1, 3]  # shards of 1, 2 and 1 rows


@pytest.fixture
def table(two):
    return sharded(TABLE, CUTS, two)


def rows(table):
    return [shard.numpy().tolist() for shard in table.variables]


def test_it_has_the_shape_of_all(table):
    assert table.shape == (4, 2) and table.ndim == 2 and table.size == 8
    assert len(table) == 4
    assert table.dtype == np.float32 and table.name == "table"
    assert table.trainable
    assert table.synchronization is js.VariableSynchronization.AUTO
    assert table.aggregation is js.VariableAggregation.NONE
    assert [shard.shape for shard in table.variables] == [(1, 2), (2, 2), (1, 2)]
    assert table.strategy is table.variables[0].strategy
    assert table.distribute_strategy is table.strategy
    assert table.is_distributed == (table.strategy is not None)


@each_of(
    "read",
    [
        lambda v: v.value(),
        lambda v: v.read_value(),
        lambda v: v.numpy(),
        np.asarray,
        jnp.asarray,
        lambda v: js.to_host({"v": v})["v"],
        lambda v: np.asarray(v, np.float64),
    ],
)
def test_it_reads_as_all_rows(table, read):
    np.testing.assert_array_equal(read(table), TABLE)


def test_it_prints_without_its_numbers():
    table = sharded(TABLE, CUTS)
    text = "<ShardedVariable 'table' float32[4,2], in shards of 1, 2 and 1 rows>"
    assert repr(table) == text
    alone = sharded(TABLE, [])
    assert repr(alone).endswith("float32[4,2], in one shard of 4 rows>")
    assert repr(sharded(TABLE[:1], [])).endswith("in one shard of 1 row>")
    assert repr(jax.tree.map(lambda _: 1, table)) == "ShardedVariable([1, 1, 1])"


def test_it_has_no_one_device(table):
    with pytest.raises(AttributeError, match=r"'table' has no one device.*part_0' on"):
        _ = table.device
    assert not hasattr(table, "device")
    used = {device for shard in table.variables for device in shard.devices}
    assert set(table.devices) == used and len(table.devices) == len(used)


@each_of("given", [None, [], (), 3, "ab", [1.0], [[js.Variable([1.0])]]])
def test_shards_are_variables_of_one_strategy(two, four, given):
    with pytest.raises(TypeError, match=r"`variables` of .* a list of one or more"):
        ShardedVariable(given)
    with pytest.raises(TypeError, match="which holds a ShardedVariable"):
        ShardedVariable([sharded(TABLE, CUTS)])
    shard = js.Variable([[1.0]])
    with pytest.raises(ValueError, match="has a variable twice"):
        ShardedVariable([shard, shard])
    with two.scope():
        first = js.Variable([[1.0]])
    with four.scope(), pytest.raises(ValueError, match="differ in their strategy"):
        ShardedVariable([first, js.Variable([[1.0]])])


@each_of(
    "first, second, text",
    [
        ({}, {"dtype": "int32"}, "differ in their dtype: .* float32 and .* int32"),
        (
            {},
            {"initial_value": [[1.0]]},
            r"beyond dimension 0: .* \(2,\) and .* \(1,\)",
        ),
        ({}, {"initial_value": [1.0]}, "number of dimensions: .* 2 and .* has 1"),
        ({}, {"aggregation": "sum"}, "aggregation: .* NONE and .* SUM"),
        ({}, {"synchronization": "on_read"}, "synchronization: .* AUTO and .* ON_READ"),
        (
            {"initial_value": 1.0},
            {"initial_value": 2.0},
            "no dimensions, and so no rows",
        ),
    ],
)
def test_shards_are_rows_of_one_table(first, second, text):
    shards = [
        js.Variable(**{"initial_value": np.ones((1, 2), np.float32), **choices})
        for choices in (first, second)
    ]
    with pytest.raises(ValueError, match=text):
        ShardedVariable(shards)


def test_assignments_are_cut_by_rows(table):
    wanted = {
        "assign": [[[4, 4]], [[5, 5], [6, 6]], [[7, 7]]],
        "assign_add": [[[5, 5]], [[7, 7], [9, 9]], [[11, 11]]],
        "assign_sub": [[[4, 4]], [[5, 5], [6, 6]], [[7, 7]]],
    }
    new = np.array([[4, 4], [5, 5], [6, 6], [7, 7]], np.float32)
    by = np.array([[1, 1], [2, 2], [3, 3], [4, 4]], np.float32)
    for method, value in {"assign": new, "assign_add": by, "assign_sub": by}.items():
        assert getattr(table, method)(value) is table
        assert rows(table) == wanted[method]
    assert table.assign(new, read_value=False) is None
    for value in (TABLE, jnp.asarray(TABLE) + 1, TABLE.tolist()):
        table.assign(value)
        np.testing.assert_array_equal(table.numpy(), value)


@each_of("method", ["assign", "assign_add", "assign_sub"])
@each_of("shape", [(3, 2), (5, 2), (4, 3), (4, 1), (1, 2), ()])
def test_another_shape_changes_nothing(table, method, shape):
    for make in (np.ones, jnp.ones):
        with pytest.raises(
            ValueError, match=r"'table' has shape \(4, 2\) and was give"
        ):
            getattr(table, method)(make(shape, np.float32))
    np.testing.assert_array_equal(table.numpy(), TABLE)


def test_a_dtype_that_would_lose_something_changes_nothing():
    table = sharded(np.zeros((4, 2), np.int32), CUTS)
    with pytest.raises(TypeError, match="'table' holds int32 and was given float32"):
        table.assign(np.full((4, 2), 0.5, np.float32))
    with pytest.raises(TypeError, match="an array or a number was wanted"):
        table.assign("text")
    assert not table.numpy().any()


@pytest.mark.slow
def test_rows_are_added_and_subtracted(table):
    table.assign_add(slices([3, 0, 3], np.ones((3, 2)), (4, 2)))
    want = TABLE + np.array([[1], [0], [0], [2]])
    np.testing.assert_array_equal(table.numpy(), want)
    table.assign_sub(slices([3, 0, 3], np.ones((3, 2))))
    np.testing.assert_array_equal(table.numpy(), TABLE)
    table.assign(slices([2], np.ones((1, 2)), (4, 2)))
    np.testing.assert_array_equal(table.numpy(), np.eye(4)[:, 2:3] * np.ones(2))


BASIC = [
    0, 3, -1, -4, np.int64(2), slice(None), slice(1, 3), slice(2, 100), slice(-2, None),
    slice(3, 1), slice(None, None, 2), slice(None, None, -1), slice(3, 0, -2), ..., (),
    (1, 1), (slice(1, 4), 0), (slice(None, None, -1), slice(0, 1)), (..., 1), (2, ...),
    (0, 1, ...), (None, 2), (slice(0, 2), None, 1), (1, None),
]  # fmt: skip
ARRAYS = [
    [2, 0],
    np.array([[3, 1], [0, -1]]),
    (slice(0, 2), np.array([1, 0])),
    (3, np.array([1, 0, 1])),
    np.array([True, False, True, True]),
    (np.array([0, 3]), np.array([1, 0])),
]


@pytest.mark.slow
@each_of("index", [*BASIC, *ARRAYS])
def test_parts_are_numpys(index):
    table = sharded(TABLE, CUTS)
    found = table[index].value()
    np.testing.assert_array_equal(found, TABLE[index])
    assert found.shape == TABLE[index].shape


@each_of(
    "index, error",
    [
        (4, IndexError),
        (-5, IndexError),
        (100, IndexError),
        (-100, IndexError),
        ((0, 2), IndexError),
        ((0, 0, 0), IndexError),
        (1.0, IndexError),
        ("a", IndexError),
        (slice(None, None, 0), ValueError),
        ([0, 4], IndexError),
    ],
)
def test_what_is_no_part_is_numpys_error(index, error):
    with pytest.raises(error):
        TABLE[index]
    table = sharded(TABLE, CUTS)
    with pytest.raises(error):
        table[index]


@each_of(
    "index",
    [jnp.array(1), slice(jnp.array(1), None), (0, jnp.array(1)), [jnp.array(0)]],
)
def test_an_array_of_jax_does_not_choose_shards(index):
    with pytest.raises(TypeError, match="has an array of JAX.*sparse_read"):
        sharded(TABLE, CUTS)[index]


# `v[...]` is all of it, and takes a value of its own shape alone.
ASSIGNED = [i for i in BASIC if str(i) not in ("Ellipsis", "(None, 2)")]


@pytest.mark.slow
@each_of("index", ASSIGNED)
def test_parts_are_assigned(index):
    table, want = sharded(TABLE, CUTS), TABLE.copy()
    value = np.arange(TABLE[index].size, dtype=np.float32).reshape(TABLE[index].shape)
    assert table[index].assign(value) is table
    want[index] = value
    np.testing.assert_array_equal(table.numpy(), want)
    table[index].assign_add(1.0)
    want[index] += 1
    np.testing.assert_array_equal(table.numpy(), want)


def test_a_part_takes_its_own_shape_only():
    table = sharded(TABLE, CUTS)
    with pytest.raises(ValueError, match=r"'table' has shape \(2, 2\) and was given"):
        table[1:3].assign(np.ones((3, 2)))
    with pytest.raises(TypeError, match="numbers and slices were wanted.*scatter_"):
        table[np.array([0, 3])].assign(1.0)
    np.testing.assert_array_equal(table.numpy(), TABLE)


@pytest.mark.slow
def test_entries_of_several_dimensions(table):
    indices = [[3, 1], [0, 0], [1, 1]]
    assert table.gather_nd(indices).tolist() == [7, 0, 3]
    assert table.gather_nd([[3], [0]]).tolist() == [[6, 7], [0, 1]]
    assert table.gather_nd([[[2, 1]], [[1, 0]]]).tolist() == [[5], [2]]
    with pytest.raises(IndexError, match=r"Row 4 of variable 'table'.*\[0, 4\)"):
        table.gather_nd([[4, 0]])
    table.scatter_nd_add([[[3, 1]], [[0, 0]], [[1, 1]]], [[10.0], [20.0], [30.0]])
    want = TABLE.copy()
    np.add.at(want, tuple(np.transpose(indices)), [10, 20, 30])
    np.testing.assert_array_equal(table.numpy(), want)
    table.scatter_nd_sub(indices, [10.0, 20.0, 30.0])
    assert table.scatter_nd_update([[2]], [[8.0, 9.0]]) is table
    assert rows(table) == [[[0, 1]], [[2, 3], [8, 9]], [[6, 7]]]
    table.batch_scatter_update(js.IndexedSlices([[5.0, 5.0]], [1]))
    assert rows(table) == [[[0, 1]], [[5, 5], [8, 9]], [[6, 7]]]


def test_it_computes_as_the_whole(table):
    two = np.ones((2, 1), np.float32)
    np.testing.assert_array_equal(table + table, TABLE + TABLE)
    np.testing.assert_array_equal(1 + table, TABLE + 1)
    np.testing.assert_array_equal(table @ two, TABLE @ two)
    np.testing.assert_array_equal(jnp.transpose(table), TABLE.T)
    np.testing.assert_array_equal(-table, -TABLE)
    np.testing.assert_array_equal(table > 2, TABLE > 2)
    np.testing.assert_array_equal(np.stack(list(table)), TABLE)
    assert isinstance(table + 1, jax.Array)


def test_it_compares_by_values(table):
    same = sharded(TABLE, [2], table.strategy)
    assert (table == same).all() and not (table != same).any()
    assert (table == TABLE).tolist() == [[True] * 2] * 4
    assert {table: 1}[table] == 1


def test_a_copy_is_itself_and_a_deep_copy_is_none(table):
    assert copy.copy(table) is table
    twin = copy.deepcopy({"v": table})["v"]
    table.assign_add(TABLE)
    np.testing.assert_array_equal(twin.numpy(), TABLE)
    assert twin.name == "table" and len(twin.variables) == 3
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(table)
    assert table.ref() == table.ref() and table.ref().deref() is table


def test_to_jax_it_is_its_shards(table):
    def is_variable(node):
        return isinstance(node, js.Variable)

    leaves, structure = jax.tree.flatten({"v": table}, is_leaf=is_variable)
    assert all(a is b for a, b in zip(leaves, table.variables, strict=True))
    assert jax.tree.unflatten(structure, leaves)["v"] is table
    arrays = jax.tree.leaves(table)
    assert [array.tolist() for array in arrays] == rows(table)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(table)]
    assert [path[:3] for path in paths] == ["[0]", "[1]", "[2]"]


def test_what_jax_makes_of_it_is_read_in_the_same_ways(table):
    doubled = jax.tree.map(lambda x: 2 * x, table)
    assert isinstance(doubled, ShardedVariable)
    np.testing.assert_array_equal(doubled.value(), 2 * TABLE)
    np.testing.assert_array_equal(doubled.numpy(), 2 * TABLE)
    np.testing.assert_array_equal(doubled[1:, 1], 2 * TABLE[1:, 1])
    np.testing.assert_array_equal(doubled.sparse_read([3, 0]), 2 * TABLE[[3, 0]])
    with pytest.raises(TypeError, match="`assign` was called on what JAX made of"):
        doubled.assign(TABLE)
    with pytest.raises(TypeError, match="`scatter_add` was called on what JAX made"):
        doubled.scatter_add(slices([0], [[1, 1]]))


def test_a_step_uses_it_as_an_argument_and_as_a_captured_object(strategy):
    table = sharded(TABLE, CUTS, strategy)

    @strategy.run
    def step(given):
        table.assign_add(jnp.ones((4, 2)))
        given[1:3].assign_sub(1.0)
        return given.assign_add(jnp.ones((4, 2))), given[3], given @ jnp.ones((2, 1))

    returned, last, product = step(table)
    want = TABLE + np.array([[2], [1], [1], [2]])
    assert returned is table
    np.testing.assert_array_equal(table.numpy(), want)
    np.testing.assert_array_equal(last, want[3])
    np.testing.assert_array_equal(product, want @ np.ones((2, 1)))


def test_what_replicas_assign_is_reduced_and_cut(two):
    table = sharded(np.zeros((8, 1)), [4], two, aggregation="sum")

    @two.run
    def step(x):
        table.assign(x)

    given = np.zeros((2, 8, 1), np.float32)
    given[0, :, 0], given[1, :, 0] = [20, 0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8]
    step(two.per_replica(given))
    assert [r.numpy()[:, 0].tolist() for r in table.variables] == [
        [21, 2, 4, 6],
        [8, 10, 12, 14],
    ]


@pytest.mark.slow
def test_shards_with_a_copy_for_each_replica(two):
    choices = {"synchronization": "on_read", "aggregation": "sum"}
    table = sharded(np.zeros((3, 1)), [1], two, **choices)

    @two.run
    def step(x):
        table.assign_add(x)
        return table.value()

    given = np.arange(6, dtype=np.float32).reshape(2, 3, 1)
    own = step(two.per_replica(given))
    np.testing.assert_array_equal(two.experimental_local_results(own), given)
    np.testing.assert_array_equal(table.numpy(), given.sum(0))
    table.assign(two.per_replica(2 * given))
    np.testing.assert_array_equal(table.numpy(), 2 * given.sum(0))
    with pytest.raises(NotImplementedError, match="'table', which has a copy per"):
        table.scatter_add(slices([0], [[1.0]]))
    table.assign_add(slices([2], [[5.0]], (3, 1)))
    assert table.numpy()[2, 0] == 2 * given.sum(0)[2, 0] + 5
