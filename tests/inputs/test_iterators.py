"""Distributed datasets and iterators in TensorFlow's words, and the source's memory."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.inputs import AT_ONCE, each_way, ranged, real, ways
from helpers.replicas import mirrored

import jaxstrategy as js


@each_way
@each_of("n", [1, 8])
def test_a_source_may_overwrite_its_arrays(n, options):
    strategy = mirrored(n)

    def source():
        x = np.zeros((16, 4), np.float32)
        for i in range(8):
            x[:] = i
            yield {"x": x, "rest": x[: 16 if i % 3 else 16]}
        x[:] = -1

    batches = list(strategy.experimental_distribute_dataset(source, options))
    for i, batch in enumerate(batches):
        for value in (batch["x"], batch["rest"]):
            assert (np.asarray(value if n == 1 else value.stacked) == i).all()
    assert len(batches) == 8


@each_of("start", [0, 16, 32, 60])
@each_of("columns", [1, 16])
def test_wherever_an_array_begins_it_may_be_overwritten(four, start, columns):
    """A device of the host may share memory that begins where it should."""
    memory = np.zeros(8 * 4 * columns + 128, np.uint8)
    start += -memory.ctypes.data % 64
    x = memory[start : start + 8 * 4 * columns].view(np.float32).reshape(8, columns)
    (batch,) = four.experimental_distribute_dataset([x], AT_ONCE)
    x[:] = -1
    assert not np.asarray(batch.stacked).any()


@each_way
def test_a_function_of_replicas_may_overwrite_its_arrays(four, options):
    def source():
        x = np.zeros((2,), np.float32)
        for i in range(10):
            x[:] = i
            yield x
        x[:] = -1

    dataset = four.distribute_datasets_from_function(lambda _: source, options)
    assert [real(batch) for batch in list(dataset)] == [
        [[0, 0], [1, 1], [2, 2], [3, 3]],
        [[4, 4], [5, 5], [6, 6], [7, 7]],
        [[8, 8], [9, 9], [], []],
    ]


@each_of("array", [np.array, jnp.array])
@each_of("n", [1, 2])
def test_the_arrays_of_a_source_are_left_alone(n, array):
    """Also by steps that overwrite their arguments."""
    strategy = mirrored(n)
    x = array([0, 1, 2, 3])
    step = strategy.run(lambda b: b + 1, options=js.RunOptions(donate_argnums=0))
    functions = {"experimental_distribute_dataset": [x]}
    functions["distribute_datasets_from_function"] = lambda _: [x] * n
    for name, source in functions.items():
        (batch,) = getattr(strategy, name)(source)
        step(batch)
        assert (batch if n == 1 else batch.stacked).is_deleted()
        assert x.tolist() == [0, 1, 2, 3]


def test_get_next(two):
    iterator = iter(two.experimental_distribute_dataset([np.arange(2)]))
    assert real(iterator.get_next()) == [[0], [1]]
    for _ in range(2):
        with pytest.raises(js.OutOfRangeError, match="The end of the data. Use `for "):
            iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)
    assert issubclass(js.OutOfRangeError, StopIteration)


def test_get_next_as_optional(two):
    iterator = iter(two.experimental_distribute_dataset([np.arange(2)]))
    first, second = (iterator.get_next_as_optional() for _ in range(2))
    assert first.has_value() and real(first.get_value()) == [[0], [1]]
    assert repr(first) == "Optional(PerReplica(int32[1] on cpu:0, cpu:1))"
    assert not second.has_value() and repr(second) == "Optional.empty()"
    with pytest.raises(ValueError, match="The optional has no value: the data has end"):
        second.get_value()


def test_a_dataset_can_be_iterated_again_and_a_generator_once(two):
    dataset = two.experimental_distribute_dataset([np.arange(2)] * 3)
    assert [len(list(dataset)), len(list(dataset))] == [3, 3]
    iterator = iter(dataset)
    assert iter(iterator) is iterator
    once = two.experimental_distribute_dataset(np.arange(2) for _ in range(3))
    assert len(list(once)) == 3
    with pytest.raises(TypeError, match="Only one pass can read the generator, and on"):
        iter(once)


def test_lengths(two):
    of = two.experimental_distribute_dataset
    assert len(of([np.arange(2)] * 3)) == 3
    assert repr(of([np.arange(2)] * 3)) == "DistributedDataset(the list, 3 steps)"
    assert repr(of([np.arange(2)])) == "DistributedDataset(the list, 1 step)"
    assert repr(of(iter([]))) == "DistributedDataset(the list_iterator)"
    assert len(of(ranged(10, 4))) == 3
    text = "How many steps the generator has is not known. Count them, or give a sour"
    with pytest.raises(TypeError, match=text):
        len(of(np.arange(2) for _ in range(3)))


def test_reduce(two):
    dataset = two.experimental_distribute_dataset(ranged(7, 4))
    rows = dataset.reduce([], lambda all, batch: all + sum(real(batch), []))
    assert rows == list(range(7))


@pytest.mark.slow
@each_of("of", ["dataset", "iterator"])
@each_way
def test_element_spec(two, options, of):
    read = []

    def source():
        for i in range(3):
            read.append(i)
            yield {"x": np.full((5, 2), i, np.float32)}

    dataset = two.experimental_distribute_dataset(source, options)
    each = dataset if of == "dataset" else iter(dataset)
    spec = each.element_spec
    assert (spec["x"].shape, spec["x"].dtype) == ((3, 2), np.float32)
    assert isinstance(spec["x"], js.PerReplica)
    assert each.element_spec is spec
    if of == "dataset" and options == AT_ONCE:
        explained = two.explain(lambda batch: js.masked_sum(batch["x"]), (spec,))
        assert isinstance(explained, js.profiling.Explanation)
    assert [batch["x"].local(0)[0, 0].item() for batch in each] == [0, 1, 2]
    assert read == [0, 1, 2]


def test_element_spec_takes_no_batch_from_the_state(two):
    iterator = iter(two.experimental_distribute_dataset(ranged(6, 2)))
    before = iterator.get_state()
    iterator.element_spec  # noqa: B018 (it reads)
    assert iterator.get_state() == before
    assert real(next(iterator)) == [[0], [1]]


@each_way
def test_element_spec_of_an_iterator_that_gave_nothing(two, options):
    text = (
        "The iterator has ended without a batch, so that what its batches are like is "
        "not known. Ask before it is closed, or ask the dataset: "
        "`dataset.element_spec`."
    )
    dataset = two.experimental_distribute_dataset(ranged(6, 4), options)
    closed, last, resumed = iter(dataset), iter(dataset), iter(dataset)
    closed.close()
    list(last)
    resumed.set_state(last.get_state())
    for iterator in (closed, resumed):
        with pytest.raises(ValueError, match=re.escape(text)):
            iterator.element_spec  # noqa: B018 (it raises)


def test_a_closed_iterator_has_ended(two):
    closed = []

    def source():
        try:
            for i in range(9):
                yield np.full(2, i)
        finally:
            closed.append(True)

    for options in ways():
        iterator = iter(two.experimental_distribute_dataset(source, options))
        next(iterator)
        iterator.close()
        iterator.close()
        assert list(iterator) == []
        with pytest.raises(js.OutOfRangeError):
            iterator.get_next()
    assert closed == [True] * 6


def test_an_iterator_says_how_many_steps_it_has_given(two):
    dataset = two.experimental_distribute_dataset(js.batches(np.arange(6), 2))
    iterator = iter(dataset)
    assert repr(iterator) == "DistributedIterator(0 steps given)"
    assert iterator.element_spec is not None  # reads one, and gives none
    assert repr(iterator) == "DistributedIterator(0 steps given)"
    next(iterator)
    assert repr(iterator) == str(iterator) == "DistributedIterator(1 step given)"
    next(iterator)
    state = iterator.get_state()
    iterator.close()
    assert repr(iterator) == "DistributedIterator(2 steps given, closed)"
    again = iter(dataset)
    again.set_state(state)
    assert repr(again) == "DistributedIterator(2 steps given)"
    again.close()
