"""Iterators of TensorFlow 1: over global batches, and over elements for replicas."""

import numpy as np
import pytest
from helpers.older import each_kind, of_kind, versions

import jaxstrategy as js
from jaxstrategy.compat import v1


def ranged(rows, size, **options):
    return js.batches(np.arange(rows), size, **options)


def parts(count, n):
    """`range(count)` in batches of 4, as the parts that `n` replicas have."""
    return [
        np.arange(start, start + 4).reshape(n, -1).tolist()
        for start in range(0, count, 4)
    ]


@each_kind
def test_each_call_takes_a_batch(kind, n):
    strategy = of_kind(kind, n)
    iterator = strategy.make_dataset_iterator(ranged(8, 4))
    for wanted in parts(8, n):
        result = strategy.experimental_run(lambda x: 10 * x, iterator)
        assert versions(strategy, result) == (10 * np.array(wanted)).tolist()
    for _ in range(2):
        with pytest.raises(js.OutOfRangeError, match=r"The end of the data\."):
            strategy.experimental_run(lambda x: 10 * x, iterator)


def test_datasets_make_iterators():
    n = 2
    strategy = of_kind("mirrored", n)
    made = [
        strategy.experimental_distribute_dataset(ranged(8, 4)),
        strategy.distribute_datasets_from_function(lambda _: ranged(8, 4)),
        strategy.experimental_distribute_datasets_from_function(lambda _: ranged(8, 4)),
    ]
    for dataset in made:
        assert isinstance(dataset, js.DistributedDataset)
        batches = [versions(strategy, batch) for batch in dataset]
        once = dataset.make_one_shot_iterator()
        assert [versions(strategy, batch) for batch in once] == batches
        with pytest.raises(js.OutOfRangeError):
            once.get_next()
        again = dataset.make_initializable_iterator()
        for _ in range(2):
            assert again.initializer == []
            assert [versions(strategy, batch) for batch in again] == batches
    assert [versions(strategy, batch) for batch in made[0]] == parts(8, n)


def test_modes_and_batches_that_are_refused():
    strategy = of_kind("mirrored", 2)
    options = js.InputOptions(remainder="error")
    iterator = strategy.make_dataset_iterator(ranged(5, 5), options)
    with pytest.raises(ValueError, match="Step 0 has 5 rows where 6 were wanted"):
        iterator.get_next()
    for mode in [js.InputReplicationMode.PER_REPLICA, "per worker"]:
        strategy = of_kind("mirrored", 2)
        with pytest.raises(ValueError, match="Input replication mode not supported"):
            strategy.make_input_fn_iterator(lambda _: range(4), mode)


def test_what_an_input_function_is_told():
    n = 4
    strategy = of_kind("mirrored", n)
    told = []

    def input_fn(context):
        told.append(context)
        return range(5 * n)

    iterator = strategy.make_input_fn_iterator(
        input_fn, v1.InputReplicationMode.PER_WORKER
    )
    wanted = np.arange(5 * n).reshape(5, n).tolist()
    assert [versions(strategy, element) for element in iterator] == wanted
    with pytest.raises(js.OutOfRangeError):
        iterator.get_next()
    iterator.initialize()
    assert versions(strategy, iterator.get_next()) == wanted[0]
    assert told == [js.InputContext(1, 0, n)]  # called once
    assert told[0].get_per_replica_batch_size(8) == 8 // n


def test_what_input_functions_may_return():
    strategy = of_kind("mirrored", 2)

    def elements_of(returned):
        iterator = strategy.make_input_fn_iterator(lambda _: returned)
        return [versions(strategy, element) for element in iterator]

    wanted = [[[0, 1], [2, 3]]]
    rows = np.arange(4).reshape(2, 2)
    assert elements_of(list(rows)) == wanted

    def generator():
        yield from rows

    assert elements_of(generator) == wanted
    assert elements_of(lambda: iter(rows)) == wanted
    with pytest.raises(TypeError, match="The int given as a dataset is not a dataset"):
        strategy.make_input_fn_iterator(lambda _: 3)
    with pytest.raises(TypeError, match="`dataset_fn` is 3, which cannot be called"):
        strategy.make_input_fn_iterator(3)


def test_a_checkpoint_has_the_place_in_the_data(tmp_path):
    strategy = of_kind("mirrored", 2)
    iterator = strategy.make_dataset_iterator(ranged(12, 4))
    iterator.get_next()
    with js.checkpoint.CheckpointManager(tmp_path) as manager:
        manager.save(0, {"data": iterator})
        other = strategy.make_dataset_iterator(ranged(12, 4))
        assert manager.restore({"data": other})["data"] is other
    assert [versions(strategy, batch) for batch in other] == parts(12, 2)[1:]
