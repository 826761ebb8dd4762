"""Batches for replicas with several devices: each device has the replica's rows.

The oracle is NumPy: replica i gets the i-th part of each global batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from helpers.cases import each_of
from helpers.cores import COLUMNS, cored, drawn
from helpers.replicas import replica

import jaxstrategy as js

X = drawn(28, 4)


def batches(size=8):
    return [X[at : at + size] for at in range(0, len(X), size)]


@each_of("sizes", [(4, 2), (2, 4), (1, 8)])
def test_all_devices_of_a_replica_have_its_rows(sizes):
    replicas, cores = sizes
    strategy = cored(replicas, cores)
    dataset = strategy.experimental_distribute_dataset(batches()[:3])
    for batch, wanted in zip(dataset, batches(), strict=False):
        if replicas == 1:
            assert batch.sharding.is_fully_replicated
            np.testing.assert_array_equal(batch, wanted)
            continue
        for i, part in enumerate(np.split(wanted, replicas)):
            of_devices = [
                shard.data
                for shard in batch.stacked.addressable_shards
                if shard.device in jax.devices()[i * cores : (i + 1) * cores]
            ]
            assert len(of_devices) == cores
            for each in of_devices:
                np.testing.assert_array_equal(each[0], part)


def test_rows_that_fill_up_count_in_no_mean():
    strategy = cored()
    dataset = strategy.experimental_distribute_dataset(batches())

    @strategy.run
    def step(x):
        x = jax.lax.with_sharding_constraint(x, COLUMNS)
        return js.masked_mean(x.sum(1)), replica().all_reduce("sum", x.sum())

    placed = list(dataset)
    for batch, wanted in zip(placed, batches(), strict=True):
        mean, total = step(batch)
        mean = strategy.reduce("mean", mean)
        np.testing.assert_allclose(mean, wanted.sum(1).mean(), rtol=1e-4, atol=1e-5)
        if len(wanted) == 8:
            np.testing.assert_allclose(total, wanted.sum(), rtol=1e-4, atol=1e-5)
    batch, last = placed[-1], batches()[-1]
    np.testing.assert_array_equal(strategy.gather(batch), last)
    np.testing.assert_allclose(
        strategy.reduce("mean", batch, axis=0), last.mean(0), rtol=1e-4, atol=1e-5
    )
    versions = strategy.experimental_local_results(batch)
    np.testing.assert_array_equal(np.concatenate(versions), last)


def test_batches_on_devices_are_copied_to_those_of_their_replicas():
    strategy = cored()
    dataset = strategy.experimental_distribute_dataset([jnp.asarray(X[:8])])
    (batch,) = list(dataset)
    np.testing.assert_array_equal(np.concatenate(batch.values), X[:8])
    assert set(batch.stacked.devices()) == set(jax.devices())
