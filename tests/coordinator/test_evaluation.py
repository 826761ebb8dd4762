"""Exact evaluation: each row of a data set counts once, whatever happens to workers."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.clusters import Cluster

import jaxstrategy as js

DATA = np.random.RandomState(0).randint(0, 100, 103).astype(np.float32)


@pytest.fixture(scope="module")
def cluster():
    with Cluster(2) as made:
        yield made


@pytest.fixture
def strategy(cluster):
    return cluster.strategy


@pytest.fixture
def coordinator(cluster):
    yield cluster.coordinator
    cluster.coordinator.join(60)


def test_shards_are_numbered_and_count_once_although_workers_are_lost(
    cluster, coordinator
):
    """CCO-61: between two joins all see one state."""
    data, lost = jnp.asarray(DATA), []

    def dies(worker, shard, shards):
        if shard in (1, 4) and shard not in lost:
            lost.append(shard)
            cluster.kill(worker)

    def evaluate(shard, shards):
        own = jnp.arange(103) % shards == shard
        return {
            "sum": jnp.where(own, data, 0).sum() + 0 * cluster.total.value(),
            "rows": own.sum(),
            "which": 2**shard,
        }

    for shards in (None, 6):
        count = 10 if shards is None else shards
        found = coordinator.evaluate(cluster.function(evaluate, dies), shards)
        assert found["sum"] == DATA.sum() and found["sum"].dtype == np.float32
        assert found["rows"] == 103 and found["rows"].dtype == np.int32
        assert found["which"] == 2**count - 1
    assert sorted(lost) == [1, 4]
    text = coordinator.function(lambda shard, count: "text")
    with pytest.raises(TypeError, match="returned 'text'; sums of numbers were"):
        coordinator.evaluate(text, 2)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="at least one shard was wanted"):
            coordinator.evaluate(text, wrong)


def batches(shard, shards, size=8):
    """The rows of a shard, the last batch smaller than the others."""
    rows = DATA[shard::shards]
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def test_the_next_evaluation_is_not_traced_again(coordinator, strategy):
    with strategy.scope():
        scale = js.Variable(1.0)
    calls = []

    @coordinator.function
    def loss(batch):
        calls.append(batch.shape)
        return scale.value() * batch.sum()

    for factor in (1.0, 2.0, 3.0):
        scale.assign(factor)
        assert coordinator.evaluate(loss, 3, batches) == factor * DATA.sum()
    assert len(calls) == len(set(calls)) <= 4  # once for each number of rows


def test_each_batch_of_each_shard_counts_once_although_workers_are_lost(
    strategy, coordinator
):
    lost = []

    def dying(shard, shards):
        for number, batch in enumerate(batches(shard, shards)):
            if (shard, number) in ((1, 1), (3, 2)) and shard not in lost:
                lost.append(shard)
                worker = js.coordinator.experimental_get_current_worker_index()
                strategy.backend.kill(int(worker))
            yield batch

    count = coordinator.function(
        lambda batch: {"sum": batch.sum(), "rows": batch.size, "max": jnp.ones(2)}
    )
    for shards, source in (1, batches), (4, dying):
        found = coordinator.evaluate(count, shards, source)
        assert found["sum"] == DATA.sum() and found["sum"].dtype == np.float32
        assert found["rows"] == 103 and found["rows"].dtype == np.int32
        number = sum(len(batches(shard, shards)) for shard in range(shards))
        np.testing.assert_array_equal(found["max"], [number, number])
    assert sorted(lost) == [1, 3]


def test_datasets_without_elements(coordinator):
    count = coordinator.function(lambda batch: batch.sum())

    def few(shard, shards):
        return [DATA[:3]] if shard in (1, 4) else []

    assert coordinator.evaluate(count, 6, few) == 2 * DATA[:3].sum()
    count = coordinator.function(lambda batch: batch.sum())
    with pytest.raises(ValueError, match="none of its 3 shards has any"):
        coordinator.evaluate(count, 3, lambda shard, shards: [])
    with pytest.raises(ValueError, match="Unexpected dataset type"):
        coordinator.evaluate(count, 3, lambda shard, shards: 5)
    with pytest.raises(ValueError, match="no shards? for you"):

        def broken(shard, shards):
            raise ValueError("no shard for you")

        coordinator.evaluate(count, 3, broken)
    calls = []

    def once(shard, shards):
        calls.append(shard)
        return [DATA] if len(calls) == 1 else []

    count = coordinator.function(lambda batch: batch.sum())
    with pytest.raises(ValueError, match="All shards of the dataset were empty on the"):
        coordinator.evaluate(count, 2, once)


def test_a_function_that_changes_variables_is_refused(coordinator, strategy):
    with strategy.scope():
        seen = js.Variable(0.0)

    @coordinator.function
    def count(batch):
        seen.assign_add(batch.size)
        return batch.sum()

    for _ in range(2):
        with pytest.raises(ValueError, match="evaluated on each batch of a dat"):
            coordinator.evaluate(count, 2, batches)
        coordinator.join()
    assert seen.value() == 0.0


def test_sums_are_rounded_once(coordinator):
    """1,000 times 0.1 in float32, which a running sum of float32 gets wrong."""
    tenth = coordinator.function(lambda batch: batch.sum())
    data = [np.full(1, 0.1, np.float32)] * 200
    found = coordinator.evaluate(tenth, 5, lambda shard, shards: data)
    assert found == np.float32(1000 * np.float64(np.float32(0.1)))
