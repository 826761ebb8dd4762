"""Partitioners: TensorFlow's numbers of parts, and what they do to variables."""

import jax
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js
from jaxstrategy.experimental import partitioners

FIXED = partitioners.FixedShardsPartitioner
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
def strategy():
    return js.MirroredStrategy(jax.devices()[:4])


def division(strategy, shape, partitioner, dtype="float32"):
    with strategy.scope():
        made = js.Variable(np.zeros(shape, dtype), name="w", sharding=partitioner)
    return made.division


def test_it_is_asked_once_and_not_for_a_scalar(strategy):
    asked = []

    def ask(shape, dtype, axis=0):
        asked.append((shape, dtype, axis))
        return [2, 1]

    assert division(strategy, (4, 4), ask, "int8").dimension == 0
    assert division(strategy, (), ask).dimension is None
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
def test_the_dimension_of_several_parts_is_divided(strategy, shape, answer, dimension):
    found = division(strategy, shape, lambda shape, dtype: answer)
    assert found.dimension == dimension
    assert found.reason if dimension is None else not found.reason


@each_of(
    "answer, error, text",
    [
        ([2, 2], ValueError, r"returned \[2, 2\]; for each dimension a number"),
        ([0, 1], ValueError, r"of variable 'w' of shape \(8, 8\) returned \[0, 1\]"),
        ([2.0, 1], TypeError, r"returned \[2.0, 1\]; a list of whole numbers"),
        (None, TypeError, "returned None"),
    ],
)
def test_answers_that_cannot_be(strategy, answer, error, text):
    with pytest.raises(error, match=text):
        division(strategy, (8, 8), lambda shape, dtype: answer)
