"""Rows of arrays as datasets, as TensorFlow 1 makes them."""

import re

import jax
import numpy as np
import pytest
from helpers.inputs import real
from helpers.older import identity, of_kind, versions

X = np.array([[1, 2], [6, 12], [2, 4], [5, 10], [3, 6], [4, 8]])
Y = np.arange(6)[::-1]


def rows_of(numpy_input):
    return of_kind("mirrored", 2).experimental_make_numpy_dataset(numpy_input)


def listed(dataset):
    return [jax.tree.map(lambda x: np.asarray(x).tolist(), each) for each in dataset]


def test_rows():
    assert listed(rows_of(np.arange(4))) == [0, 1, 2, 3]
    pairs = rows_of((np.arange(3), np.arange(6.0).reshape(3, 2)))
    assert listed(pairs) == [(0, [0.0, 1.0]), (1, [2.0, 3.0]), (2, [4.0, 5.0])]
    named = rows_of({"x": np.arange(2), "y": np.ones((2, 1))})
    assert listed(named) == [{"x": 0, "y": [1.0]}, {"x": 1, "y": [1.0]}]
    assert listed(named) == listed(named)  # a new pass each time
    assert (len(pairs), bool(pairs), repr(pairs)) == (
        3,
        True,
        "NumpyDataset(3 elements)",
    )


def test_extended_has_the_method_too():
    strategy = of_kind("one")
    assert listed(strategy.extended.experimental_make_numpy_dataset(Y)) == Y.tolist()
    assert listed(strategy.experimental_make_numpy_dataset(Y, session=None))


def test_a_list_is_one_array():
    stacked = rows_of([np.arange(3), np.arange(3) + 10])
    assert listed(stacked) == [[0, 1, 2], [10, 11, 12]]
    in_tuple = rows_of(([1, 2], {"y": [np.zeros(1), np.ones(1)]}))
    assert listed(in_tuple) == [(1, {"y": [0.0]}), (2, {"y": [1.0]})]


@pytest.mark.parametrize(
    "given, text",
    [
        ([np.arange(3), np.arange(2)],
         "A list in `numpy_input` is one array, but what this one holds differs in"),
        ((np.ones(3), np.ones(2)), "The arrays of `numpy_input` have 2 and 3 rows."),
        ((), "`numpy_input` is (), which holds no array."),
        (np.float32(3), "`numpy_input` holds"),
    ],
)  # fmt: skip
def test_what_has_no_rows(given, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        rows_of(given)


# What is measured with `tf.data`: the same elements in the same order.
@pytest.mark.parametrize(
    "make, wanted",
    [
        (lambda d: d.batch(4), [[0, 1, 2, 3], [4, 5]]),
        (lambda d: d.batch(4, drop_remainder=True), [[0, 1, 2, 3]]),
        (lambda d: d.batch(7, True), []),
        (lambda d: d.repeat(2).batch(5), [[0, 1, 2, 3, 4], [5, 0, 1, 2, 3], [4, 5]]),
        (lambda d: d.batch(5).repeat(2), [[0, 1, 2, 3, 4], [5], [0, 1, 2, 3, 4], [5]]),
        (lambda d: d.shard(2, 1), [1, 3, 5]),
        (lambda d: d.shard(4, 1), [1, 5]),
        (lambda d: d.shard(8, 7), []),
        (lambda d: d.repeat(2).shard(4, 3), [3, 1, 5]),
        (lambda d: d.batch(2).shard(2, 1), [[2, 3]]),
        (lambda d: d.batch(2).batch(2), [[[0, 1], [2, 3]], [[4, 5]]]),
        (lambda d: d.repeat(0), []),
        (lambda d: d.batch(6, drop_remainder=True), [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_datasets_of_datasets(make, wanted):
    dataset = make(rows_of(np.arange(6)))
    assert listed(dataset) == wanted
    assert len(dataset) == len(wanted)


@pytest.mark.parametrize("count", [None, -1])
def test_rows_without_end(count):
    dataset = rows_of(np.arange(3)).repeat(count).batch(4)
    found = iter(dataset)
    assert [next(found).tolist() for _ in range(2)] == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert dataset and repr(dataset) == "NumpyDataset(without end)"
    with pytest.raises(TypeError, match="repeated without end has no `len`"):
        len(dataset)


def test_shuffled_rows():
    dataset = rows_of(np.arange(20)).shuffle(20, seed=3)
    first, second = listed(dataset), listed(dataset)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20))
    again = rows_of(np.arange(20)).shuffle(20, seed=3)
    assert (listed(again), listed(again)) == (first, second)
    both = listed(rows_of(np.arange(20)).shuffle(20, seed=3).repeat(2))
    assert both == first + second


def test_shuffled_in_a_small_buffer():
    found = listed(rows_of(np.arange(50)).shuffle(3, seed=0))
    assert sorted(found) == list(range(50))
    # An element comes at most two places before its own.
    assert all(place >= element - 2 for place, element in enumerate(found))
    assert listed(rows_of(np.arange(5)).shuffle(1, seed=0)) == list(range(5))


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda d: d.batch(0), ValueError, "`batch_size` is 0; it is to be at least 1"),
        (lambda d: d.batch("4"), TypeError, "`batch_size` is '4'; it is to be an int"),
        (lambda d: d.repeat(-2), ValueError, "`count` is -2; it is to be at least -1"),
        (lambda d: d.shard(2, 2), ValueError, "`index` is 2; it is to be less than 2"),
        (lambda d: d.shard(0, 0), ValueError, "`num_shards` is 0; it is to be at"),
        (lambda d: d.shuffle(9), ValueError, "`shuffle` was given no seed"),
        (lambda d: d.shuffle(9, -1), ValueError, "`seed` is -1"),
        (lambda d: list(d.batch(4).batch(2)), ValueError, "Batches of batches"),
    ],
)
def test_arguments_without_meaning(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call(rows_of(np.arange(6)))


def test_two_passes_over_pairs():
    strategy = of_kind("mirrored", 2)
    dataset = strategy.experimental_make_numpy_dataset((X, Y)).repeat(2).batch(6)
    iterator = strategy.make_dataset_iterator(dataset)
    for _ in range(2):
        x, y = strategy.experimental_run(identity, iterator)
        assert sum(versions(strategy, x), []) == X.tolist()
        assert sum(versions(strategy, y), []) == Y.tolist()
    with pytest.raises(StopIteration):
        strategy.experimental_run(identity, iterator)


def test_parts_of_replicas():
    strategy = of_kind("mirrored", 2)
    ones = strategy.experimental_make_numpy_dataset(np.ones(10)).batch(4)
    iterator = strategy.make_dataset_iterator(ones)
    # TensorFlow divides the last batch by its own rows, 1 + 1.
    assert [[len(v) for v in real(x)] for x in iterator] == [[2, 2], [2, 2], [2, 0]]
    dataset = strategy.experimental_make_numpy_dataset(np.ones(4)).batch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    assert [versions(strategy, x) for x in distributed] == [[[1.0], [1.0]]] * 2
    assert len(distributed) == 2


def test_dtypes_are_those_of_jax():
    strategy = of_kind("mirrored", 2)
    dataset = strategy.experimental_make_numpy_dataset((np.arange(4), np.ones(4)))
    x, y = strategy.make_dataset_iterator(dataset.batch(4)).get_next()
    wanted = [jax.dtypes.canonicalize_dtype(t) for t in (np.int64, np.float64)]
    assert [x.dtype, y.dtype] == wanted
