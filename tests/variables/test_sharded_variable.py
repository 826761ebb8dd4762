"""A table in shards is made by a partitioner, and used as one variable of all rows."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.sharded import sharded, slices

import jaxstrategy as js
from jaxstrategy.experimental import ShardedVariable, partitioners

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


@each_of("first, second, text", [
    ({}, {"dtype": "int32"}, "differ in their dtype: .* float32 and .* int32"),
    ({}, {"initial_value": [[1.0]]}, r"beyond dimension 0: .* \(2,\) and .* \(1,\)"),
    ({}, {"initial_value": [1.0]}, "number of dimensions: .* 2 and .* has 1"),
    ({}, {"aggregation": "sum"}, "aggregation: .* NONE and .* SUM"),
    ({}, {"synchronization": "on_read"}, "synchronization: .* AUTO and .* ON_READ"),
    ({"initial_value": 1.0}, {"initial_value": 2.0}, "no dimensions, and so no rows"),
])  # fmt: skip
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


# In the scope of a strategy with a partitioner, variables are made in shards.

FIXED = partitioners.FixedShardsPartitioner


def partitioned(partitioner, devices=2):
    """A strategy that makes shards, each of which lies as any variable of it."""
    strategy = js.MirroredStrategy(jax.devices()[:devices])
    strategy._variable_policy.partitioner = partitioner
    return strategy


def made(partitioner, *args, **kwargs):
    with partitioned(partitioner).scope():
        return js.Variable(*args, **kwargs)


def lengths(variable):
    return [shard.shape[0] for shard in variable.variables]


@pytest.mark.slow
@each_of(
    "rows, shards, wanted",
    [
        (10, 4, [3, 3, 2, 2]),
        (7, 3, [3, 2, 2]),
        (5, 2, [3, 2]),
        (6, 2, [3, 3]),
        (3, 4, [1, 1, 1]),
    ],
)
@each_of("give", ["array", "list", "function"])
def test_earlier_shards_are_longer(rows, shards, wanted, give):
    value = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
    given = {"array": value, "list": value.tolist(), "function": lambda: value}[give]
    v = made(FIXED(shards), given, name="w")
    assert isinstance(v, ShardedVariable)
    assert lengths(v) == wanted and v.shape == (rows, 2)
    np.testing.assert_array_equal(v.numpy(), value)


def test_names_and_choices_reach_every_shard():
    value = np.arange(4.0)
    v = made(FIXED(2), value, False, "int32", "w", "auto", "sum")
    assert v.name == "w" and not v.trainable and v.dtype == np.int32
    assert v.aggregation is js.VariableAggregation.SUM
    assert [shard.name for shard in v.variables] == ["w/part_0", "w/part_1"]
    for shard in v.variables:
        assert not shard.trainable and shard.dtype == np.int32
        assert shard.aggregation is js.VariableAggregation.SUM
        assert shard.strategy is v.strategy and isinstance(shard, js.Variable)
    assert v.strategy.extended.variable_created_in_scope(v.variables[0])


@each_of(
    "partitioner, value, choices",
    [
        (FIXED(2), 3.0, {}),
        (FIXED(2), [3.0], {}),
        (FIXED(2), np.zeros((0, 3)), {}),
        (FIXED(1), [1.0, 2.0], {}),
        (partitioners.MinSizePartitioner(1024, 10), np.ones((10, 2)), {}),
        (None, [1.0, 2.0], {}),
        (FIXED(2), [1.0, 2.0], {"sharding": 0}),
        (FIXED(2), [1.0, 2.0], {"sharding": "whole"}),
        (FIXED(2), [1.0, 2.0], {"synchronization": "on_read", "aggregation": "mean"}),
        (FIXED(2), lambda: jax.random.split(jax.random.key(0), 4), {}),
        (lambda shape, dtype: [7], [1.0], {}),
    ],
)
def test_these_are_plain(partitioner, value, choices):
    v = made(partitioner, value, name="v", **choices)
    assert isinstance(v, js.Variable) and v.name == "v"
    want = value() if callable(value) else jnp.asarray(value)
    if not callable(value):
        np.testing.assert_array_equal(v.numpy(), want)


class Parts:
    """An initializer that makes the part it is asked for, and remembers which."""

    def __init__(self):
        self.asked = []

    def __call__(self, shape, dtype, partition_shape=None, partition_offset=None):
        self.asked.append((partition_shape, partition_offset))
        rows, columns = partition_shape or shape
        first, _ = partition_offset or (0, 0)
        return np.eye(rows, columns, first, dtype=dtype)


def test_a_part_is_made_where_only_that_is_asked_for():
    parts = Parts()
    make = functools.partial(parts, shape=(4, 4), dtype=np.int32)
    v = made(FIXED(2), make, dtype=np.int32, shape=(4, 4))
    assert [s.numpy().tolist() for s in v.variables] == [
        [[1, 0, 0, 0], [0, 1, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 0, 1]],
    ]
    assert parts.asked == [((2, 4), (0, 0)), ((2, 4), (2, 0))]
    parts.asked.clear()
    make = functools.partial(parts, shape=(5, 2), dtype=np.float32)
    v = made(FIXED(2), make, dtype=np.float32, shape=[5, 2])
    assert parts.asked == [((3, 2), (0, 0)), ((2, 2), (3, 0))]
    np.testing.assert_array_equal(v.numpy(), np.eye(5, 2))


def test_without_a_type_the_function_is_traced_for_it():
    made_here = []

    def zeros(partition_shape=(5, 2), partition_offset=(0, 0)):
        made_here.append(partition_shape)
        return jnp.zeros(partition_shape) + partition_offset[0]

    v = made(FIXED(2), zeros)
    assert made_here == [(5, 2), (3, 2), (2, 2)]  # the first without numbers
    assert v.numpy()[:, 0].tolist() == [0, 0, 0, 3, 3]


def test_a_part_of_another_shape_is_an_error():
    def value(partition_shape, partition_offset):
        return np.zeros((1, 1))

    with pytest.raises(ValueError, match=r"'w' was asked for the part of shape \(3, 2"):
        made(FIXED(2), value, name="w", dtype="float32", shape=(5, 2))


@each_of(
    "given, error, text",
    [
        ((3,), ValueError, r"'w' was made with `shape` \(3,\) and a value of .*\(2,\)"),
        ("ab", TypeError, "`shape` of variable 'w' was 'ab'"),
        (2, TypeError, "`shape` of variable 'w' was 2"),
    ],
)
@each_of("partitioner", [None, FIXED(2)])
def test_the_shape_is_that_of_the_value(partitioner, given, error, text):
    with pytest.raises(error, match=text):
        made(partitioner, [1.0, 2.0], name="w", shape=given)
    assert made(partitioner, [1.0, 2.0], shape=[2]).shape == (2,)


def test_without_an_initial_value():
    for arguments in [(), (None,)]:
        with pytest.raises(ValueError, match="'w' was made without an initial value"):
            made(FIXED(2), *arguments, name="w", shape=(4, 2), dtype="float32")
    with pytest.raises(TypeError, match="initial_value"):
        js.Variable()


@each_of(
    "answer, error, text",
    [
        ([1, 2], ValueError, r"'w' of shape \(4, 2\) returned \[1, 2\]; the number of"),
        ([0, 1], ValueError, r"returned \[0, 1\]"),
        ([-1, 1], ValueError, r"returned \[-1, 1\]"),
        ([], ValueError, r"returned \[\]"),
        ([1, 1, 1], ValueError, r"returned \[1, 1, 1\]"),
        (None, TypeError, "returned None; a list of whole numbers"),
        ([2.0, 1], TypeError, "a list of whole numbers"),
    ],
)
def test_answers_that_cannot_be(answer, error, text):
    with pytest.raises(error, match=text):
        made(lambda shape, dtype: answer, np.zeros((4, 2)), name="w")


def test_beside_a_shard_it_is_in_one_piece():
    strategy = partitioned(FIXED(2))
    with strategy.scope():
        v = js.Variable(np.zeros((4, 2)))
        with strategy.extended.colocate_vars_with(v.variables[1]):
            beside = js.Variable(np.ones((4, 2)))
    assert isinstance(beside, js.Variable)
    assert beside.devices == v.variables[1].devices


# Partitioners: TensorFlow's numbers of parts, and what they do to variables.

MIN = partitioners.MinSizePartitioner
MAX = partitioners.MaxSizePartitioner


# All numbers are TensorFlow's.
@each_of(
    "partitioner, shape, wanted",
    [
        (FIXED(4), (3,), [3]),
        (FIXED(3), (7, 5), [3, 1]),
        (MIN(4, 2), (6, 1), [2, 1]),
        (MIN(8, 10), (6, 1), [3, 1]),
        (MIN(25, 10), (6, 1), [1, 1]),
        (MIN(1 << 20, 8), (1000000, 1), [4, 1]),
        (MIN(max_shards=10), (1000000, 64), [10, 1]),
        (MAX(4, 2), (6, 1), [2, 1]),
        (MAX(8), (6, 1), [3, 1]),
        (MAX(23), (6, 1), [2, 1]),
        (MAX(39), (10, 5), [10, 1]),
        (MAX(40), (10, 5), [5, 1]),
    ],
)
def test_the_number_of_parts_of_float32(partitioner, shape, wanted):
    assert partitioner(shape, np.float32) == wanted


@each_of(
    "partitioner, shape, wanted",
    [
        (MIN(256 << 10, 4), (1000, 64), (1, 1, 2)),
        (MAX(100), (10, 5), (1, 2, 5)),
        (MAX(39), (10, 5), (4, 10, 10)),
    ],
)
def test_the_number_of_parts_by_the_size_of_elements(partitioner, shape, wanted):
    dtypes = (np.float16, "float32", np.dtype("float64"))
    assert tuple(partitioner(shape, d)[0] for d in dtypes) == wanted


def test_another_axis():
    assert FIXED(2)((4, 10), np.float32, axis=1) == [1, 2]
    assert MIN(4, 10)((6, 4), np.float32, axis=1) == [1, 4]
    assert MAX(24)((6, 4), np.float32, axis=1) == [1, 4]
    with pytest.raises(ValueError, match=r"`axis` was 2, but the shape is \(6, 4\)"):
        FIXED(2)((6, 4), np.float32, axis=2)


def test_texts_have_a_size_that_is_given():
    assert MAX(16)((4,), np.dtype(object)) == [4]
    assert MAX(16, bytes_per_string=8)((4,), np.dtype("U3")) == [2]


def test_a_scalar_has_no_dimension_and_an_empty_array_one_part():
    assert FIXED(2)((), np.float32) == []
    assert [each((0, 3), np.float32) for each in (FIXED(2), MIN(), MAX(4))] == (
        [[1, 1]] * 3
    )


@each_of(
    "make, error, text",
    [
        (lambda: FIXED(0), ValueError, "`num_shards` was 0; 1 or more was wanted"),
        (lambda: FIXED(2.0), TypeError, "`num_shards` was 2.0; a whole number"),
        (lambda: MIN(0), ValueError, "`min_shard_bytes` was 0"),
        (lambda: MIN(4, -1), ValueError, "`max_shards` was -1"),
        (lambda: MIN(4, 1, 0), ValueError, "`bytes_per_string` was 0"),
        (lambda: MAX(0), ValueError, "`max_shard_bytes` was 0"),
        (lambda: MAX(4, None, 0), ValueError, "`bytes_per_string` was 0"),
        (lambda: FIXED(2)(4, "int8"), TypeError, "`shape` was 4; a list of whole"),
        (lambda: MIN()((4.0,), "int8"), TypeError, r"`shape` was \(4.0,\)"),
        (lambda: MAX(4)((4,), "int7"), TypeError, "`dtype` was 'int7'; a dtype"),
        (lambda: MIN()((4,), "int8", "x"), ValueError, "`axis` was 'x', but the shape"),
    ],
)
def test_numbers_that_cannot_be(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_the_base_class_says_nothing():
    with pytest.raises(NotImplementedError, match="Partitioner does not say how"):
        partitioners.Partitioner()((4,), np.float32)


@pytest.fixture(scope="module")
def dividing():
    return js.MirroredStrategy(jax.devices()[:4])


def division(strategy, shape, partitioner, dtype="float32"):
    with strategy.scope():
        made = js.Variable(np.zeros(shape, dtype), name="w", sharding=partitioner)
    return made.division


def test_it_is_asked_once_and_not_for_a_scalar(dividing):
    asked = []

    def ask(shape, dtype, axis=0):
        asked.append((shape, dtype, axis))
        return [2, 1]

    assert division(dividing, (4, 4), ask, "int8").dimension == 0
    assert division(dividing, (), ask).dimension is None
    assert asked == [((4, 4), np.dtype("int8"), 0)]


@each_of(
    "shape, answer, dimension",
    [
        ((4,), [9], 0),
        ((8, 2), (2,), 0),
        ((8, 8), [1, 1], None),
        ((6, 8), [2, 1], None),
        ((0, 4), [2, 1], None),
    ],
)
def test_the_dimension_of_several_parts_is_divided(dividing, shape, answer, dimension):
    found = division(dividing, shape, lambda shape, dtype: answer)
    assert found.dimension == dimension
    assert found.reason if dimension is None else not found.reason
