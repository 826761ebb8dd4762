"""In the scope of a strategy with a partitioner, variables are made in shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js
from jaxstrategy.experimental import ShardedVariable, partitioners

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


def test_in_the_first_trace_of_a_step():
    strategy = partitioned(FIXED(2))
    kept = {}

    @strategy.run
    def step(x):
        if not kept:
            kept["v"] = js.Variable(np.zeros((3, 2)), name="w")
        return kept["v"].assign_add(jnp.ones((3, 2)) * x)

    assert step(2.0) is kept["v"]
    assert step(3.0) is kept["v"]
    assert lengths(kept["v"]) == [2, 1]
    assert kept["v"].numpy().tolist() == [[5, 5]] * 3
