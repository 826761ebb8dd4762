"""Rows of arrays as datasets, as TensorFlow 1 makes them."""

import re

import jax
import numpy as np
import pytest
from helpers.older import of_kind


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
    stacked = rows_of([np.arange(3), np.arange(3) + 10])
    assert listed(stacked) == [[0, 1, 2], [10, 11, 12]]
    in_tuple = rows_of(([1, 2], {"y": [np.zeros(1), np.ones(1)]}))
    assert listed(in_tuple) == [(1, {"y": [0.0]}), (2, {"y": [1.0]})]


def test_what_has_no_rows():
    for given, text in [
        (
            [np.arange(3), np.arange(2)],
            "A list in `numpy_input` is one array, but what this one holds differs in",
        ),
        ((np.ones(3), np.ones(2)), "The arrays of `numpy_input` have 2 and 3 rows."),
        ((), "`numpy_input` is (), which holds no array."),
        (np.float32(3), "`numpy_input` holds"),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            rows_of(given)


# What is measured with `tf.data`: the same elements in the same order.


def test_rows_without_end():
    for count in [None, -1]:
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


def test_arguments_without_meaning():
    for call, error, text in [
        (lambda d: d.batch(0), ValueError, "`batch_size` was 0; 1 or more was wanted"),
        (lambda d: d.batch("4"), TypeError, "`batch_size` was '4'; a whole number was"),
        (lambda d: d.repeat(-2), ValueError, "`count` was -2; -1 or more was wanted"),
        (lambda d: d.shard(2, 2), ValueError, "`index` is 2; it is to be less than 2"),
        (lambda d: d.shard(0, 0), ValueError, "`num_shards` was 0; 1 or more"),
        (lambda d: d.shuffle(9), ValueError, "`shuffle` was given no seed"),
        (lambda d: d.shuffle(9, -1), ValueError, "`seed` was -1; 0 or more"),
        (lambda d: list(d.batch(4).batch(2)), ValueError, "Batches of batches"),
    ]:
        with pytest.raises(error, match=re.escape(text)):
            call(rows_of(np.arange(6)))
