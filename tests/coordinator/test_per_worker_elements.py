"""Elements of other shapes, and of batches over the devices of each worker."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.clusters import coordinated, until_each_has

import jaxstrategy as js

index = js.coordinator.experimental_get_current_worker_index


@pytest.fixture(scope="module")
def workers():
    with coordinated(2, devices=2) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def double():
    """One worker with two devices."""
    with coordinated(1, devices=2) as coordinator:
        yield coordinator


def test_a_smaller_last_batch_is_not_lost(one):
    traces = []

    def make():
        return js.batches(np.arange(10.0, dtype=np.float32), 4)

    @one.function
    def step(iterator):
        batch = next(iterator)
        traces.append(batch.shape)
        return batch.sum()

    iterator = iter(one.create_per_worker_dataset(make))
    found = one.fetch([one.schedule(step, (iterator,)) for _ in range(3)])
    assert found == [6, 22, 17]
    assert traces == [(4,), (2,)]
    # A second pass needs no trace.
    iterator = iter(one.create_per_worker_dataset(make))
    assert one.fetch([one.schedule(step, (iterator,)) for _ in range(3)]) == found
    assert traces == [(4,), (2,)]


def test_another_structure_is_an_error_of_the_function(one):
    iterator = iter(one.create_per_worker_dataset(lambda: [(1, 2), {"x": 1}]))
    step = one.function(lambda iterator: next(iterator))
    assert one.schedule(step, (iterator,)).fetch() == (1, 2)
    one.schedule(step, (iterator,))
    with pytest.raises(ValueError, match="another structure than the first"):
        one.join()


def test_each_worker_comes_to_its_own_shapes():
    with coordinated(3) as three:

        def make():
            return [np.ones(1 + index())] * 50

        iterator = iter(three.create_per_worker_dataset(make))
        step = three.function(lambda it: (index(), next(it).sum()))
        for worker, values in until_each_has(three, step, (iterator,)).items():
            assert set(map(float, values)) == {1.0 + worker}


def test_a_distributed_dataset_is_for_workers(workers):
    strategy = workers.strategy
    made = [
        strategy.experimental_distribute_dataset([np.ones(4)]),
        strategy.distribute_datasets_from_function(lambda context: [np.ones(4)]),
        strategy.experimental_distribute_datasets_from_function(lambda _: [1]),
    ]
    for dataset in made:
        assert isinstance(dataset, js.DistributedDataset)
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            iter(dataset)
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            dataset.reduce(0, lambda state, batch: state)
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            _ = dataset.element_spec
        with pytest.raises(TypeError, match="on the workers only"):
            len(dataset)
    assert repr(made[0]) == "DeferredDataset(the list)"
    with pytest.raises(TypeError, match="is not a dataset"):
        strategy.experimental_distribute_dataset(3)
    with pytest.raises(TypeError, match="which cannot be called"):
        strategy.distribute_datasets_from_function([1])
    per_replica = js.InputReplicationMode.PER_REPLICA
    options = js.InputOptions(experimental_replication_mode=per_replica)
    with pytest.raises(ValueError, match="PER_REPLICA is for input functions"):
        strategy.experimental_distribute_dataset([1], options)


@pytest.mark.parametrize("within", [True, False], ids=["in the function", "as it is"])
def test_a_batch_is_divided_over_the_workers_devices(workers, within):
    """Batches of 4 rows: each of N replicas has 4 / N of them."""
    strategy, count = workers.strategy, workers.strategy.num_replicas_in_sync
    rows = [np.arange(1.0, 5.0, dtype=np.float32)] * 40

    def make():
        return strategy.experimental_distribute_dataset(rows)

    dataset = workers.create_per_worker_dataset(make if within else make())
    spec = dataset.element_spec
    assert isinstance(spec, js.PerReplica)
    assert spec.stacked.shape == (count, 4 // count)

    @workers.function
    def step(iterator):
        batch = next(iterator)
        return index(), strategy.experimental_local_results(
            strategy.run(lambda x: 10 * x, (batch,))
        )

    for found in until_each_has(workers, step, (iter(dataset),)).values():
        parts = np.arange(1, 5).reshape(count, -1)
        np.testing.assert_array_equal(found[0], 10 * parts)


def test_an_input_function_makes_a_batch_for_each_replica(workers):
    strategy, count = workers.strategy, workers.strategy.num_replicas_in_sync
    contexts = []

    def input_fn(context):
        contexts.append(context)
        assert context.get_per_replica_batch_size(8) == 8 // count
        return js.batches(np.arange(1.0, 41.0, dtype=np.float32), 1)

    def make():
        return strategy.distribute_datasets_from_function(input_fn)

    @workers.function
    def step(iterator):
        return index(), strategy.experimental_local_results(next(iterator))

    iterator = iter(workers.create_per_worker_dataset(make))
    for found in until_each_has(workers, step, (iterator,)).values():
        expected = np.arange(1.0, 1.0 + count)[:, None]
        np.testing.assert_array_equal(found[0], expected)
    assert set(contexts) == {js.InputContext(1, 0, count)}


def test_rows_that_are_not_real_do_not_count(double):
    """7 rows in batches of 4 over 2 replicas: the sums are those of NumPy."""
    strategy = double.strategy
    rows = np.arange(1.0, 8.0, dtype=np.float32)
    traces = []

    def make():
        return strategy.experimental_distribute_dataset(js.batches(rows, 4))

    @double.function
    def step(iterator):
        batch = next(iterator)
        traces.append(1)

        def replica(x):
            return js.masked_sum(x), js.masked_mean(x), js.batch_mask(2 * x)

        sums, means, masks = strategy.run(replica, (batch,))
        return (
            strategy.reduce("sum", sums),
            strategy.reduce("mean", means),
            strategy.experimental_local_results(masks),
        )

    iterator = iter(double.create_per_worker_dataset(make))
    full, last = double.fetch([double.schedule(step, (iterator,)) for _ in range(2)])
    np.testing.assert_allclose(full[:2], [10, 2.5])
    np.testing.assert_allclose(last[:2], [18, 6])
    np.testing.assert_array_equal(full[2], [[True, True], [True, True]])
    np.testing.assert_array_equal(last[2], [[True, True], [True, False]])
    assert len(traces) == 2  # a full batch needs no mask


def test_a_function_that_asks_for_no_mask_is_told(double):
    strategy = double.strategy
    dataset = strategy.experimental_distribute_dataset([np.ones(4), np.ones(3)])
    iterator = iter(double.create_per_worker_dataset(dataset))

    @double.function
    def step(iterator):
        return strategy.reduce("sum", strategy.run(jnp.sum, (next(iterator),)))

    assert double.schedule(step, (iterator,)).fetch() == 4
    with pytest.warns(js.errors.PaddedRowsWarning, match="`step` was given a batch"):
        double.schedule(step, (iterator,))
        double.join()


@pytest.mark.parametrize("scheduled", [True, False])
def test_masks_of_arguments_count(double, scheduled):
    """Batches of another strategy: the sums are those of NumPy."""
    mirrored = js.MirroredStrategy(js.simulate(8)[:2])
    rows = np.arange(1.0, 8.0, dtype=np.float32)
    batches = mirrored.experimental_distribute_dataset(js.batches(rows, 4))
    strategy = double.strategy

    def sums(batch):
        return strategy.reduce("sum", strategy.run(js.masked_sum, (batch,)))

    step = double.function(sums)
    found = [
        double.schedule(step, (batch,)).fetch() if scheduled else sums(batch)
        for batch in batches
    ]
    assert found == [10, 18]


def test_the_masks_of_two_batches_are_not_taken_for_one(double):
    strategy = double.strategy
    dataset = strategy.experimental_distribute_dataset([np.ones(3), np.ones(3)])
    pair = [iter(double.create_per_worker_dataset(dataset)) for _ in range(2)]

    @double.function
    def step(first, second):
        def replica(x, y):
            return js.masked_sum(x + y)

        return strategy.run(replica, (next(first), next(second)))

    with pytest.raises(ValueError, match="Say which batch is meant"):
        double.schedule(step, pair)
