"""Checkpoints of replicas that share devices, read where replicas lie otherwise.

The oracle is what was written, in NumPy; where it is to lie, the target says.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager, MismatchError


def strategy_of(devices, each, shard=None):
    sharding = js.StateSharding(shard, min_bytes=0) if shard else None
    return js.MirroredStrategy(
        jax.devices()[:devices], sharding=sharding, replicas_per_device=each
    )


LAYOUTS = {
    "2 x 4": (2, 4),
    "8 x 1": (8, 1),
    "1 x 2": (1, 2),
    "2 x 4, divided": (2, 4, "state"),
    "8 x 1, divided": (8, 1, "state"),
    "4 x 2, divided moments": (4, 2, "optimizer"),
}
W = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
OWN = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
AGGREGATIONS = {"sum": np.sum, "mean": np.mean, "only_first_replica": np.min}


@functools.cache
def layout(name):
    return strategy_of(*LAYOUTS[name])


def state_of(strategy, factor):
    """A state with everything in it that any number of replicas can hold."""
    params = {"w": factor * W, "odd": factor * W[:3, 0]}
    moments = jax.tree.map(
        lambda x: x + jnp.asarray(factor, x.dtype), optax.adam(0.1).init(params)
    )
    with strategy.scope():
        variables = {"mirrored": js.Variable(2 * factor * W, aggregation="mean")}
        for aggregation in AGGREGATIONS:
            variables[aggregation] = js.Variable(
                0.0, synchronization="on_read", aggregation=aggregation
            )
    mirrored = strategy.mirror({"params": params, "optimizer": moments})
    key = strategy.mirror(jax.random.key(factor))
    return {**mirrored, "variables": variables, "key": key}


def added(strategy, variables, numbers):
    """Adds to each on-read variable a number of each replica."""

    def step(x):
        for aggregation in AGGREGATIONS:
            variables[aggregation].assign_add(x)

    strategy.run(step, (strategy.per_replica(np.float32(numbers)),))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder with what a layout has written: a state, and versions of its own."""

    @functools.cache
    def folder_of(name):
        strategy, folder = layout(name), tmp_path_factory.mktemp("written")
        count = strategy.num_replicas_in_sync
        state = state_of(strategy, 1)
        added(strategy, state["variables"], 1 + np.arange(count))
        with CheckpointManager(folder, strategy, asynchronous=False) as manager:
            manager.save(1, state)
            manager.save(2, {"own": strategy.per_replica(OWN[:count])})
        return folder

    return folder_of


def restored(folder, strategy, like, step):
    with CheckpointManager(folder, strategy) as manager:
        return manager.restore(like, step)


def placements(tree):
    return [str(x.sharding) for x in jax.tree.leaves(tree)]


@pytest.mark.slow
@each_of("reader", ["2 x 4", "8 x 1, divided"])
def test_each_layout_reads_what_others_wrote(written, reader):
    strategy = layout(reader)
    like = state_of(strategy, 0)
    before, wanted = placements(like), state_of(js.get_strategy(), 1)
    variables = like["variables"]
    for writer in LAYOUTS:
        found = restored(written(writer), strategy, like, 1)
        assert placements(found) == before
        for part in ("params", "optimizer"):
            jax.tree.map(np.testing.assert_array_equal, found[part], wanted[part])
        strategy.assert_in_sync({k: found[k] for k in ("params", "optimizer")})
        assert jax.random.key_data(found["key"]).tolist() == [0, 1]
        assert found["variables"]["mirrored"] is variables["mirrored"]
        np.testing.assert_array_equal(variables["mirrored"].numpy(), 2 * W)
        numbers = 1 + np.arange(layout(writer).num_replicas_in_sync)
        for name, combined in AGGREGATIONS.items():
            assert float(variables[name]) == combined(numbers), (writer, name)
    # Each replica goes on from there: the last writer had 8.
    added(strategy, variables, np.ones(strategy.num_replicas_in_sync))
    after = [float(variables[name]) for name in AGGREGATIONS]
    assert after == [36 + strategy.num_replicas_in_sync, 5.5, 2]


@each_of("reader", ["2 x 4", "1 x 2"])
def test_versions_come_back_to_as_many_replicas(written, reader):
    strategy = layout(reader)
    count = strategy.num_replicas_in_sync
    like = {"own": strategy.per_replica(np.zeros_like(OWN[:count]))}
    for writer in LAYOUTS:
        others = layout(writer).num_replicas_in_sync
        if others != count:
            message = f"for {others} replicas in the checkpoint, and a .* for {count} "
            with pytest.raises(MismatchError, match=message):
                restored(written(writer), strategy, like, 2)
            continue
        own = restored(written(writer), strategy, like, 2)["own"]
        np.testing.assert_array_equal(np.asarray(own.stacked), OWN[:count])
        versions = zip(own.values, strategy.devices, strict=True)
        assert all(version.devices() == {device} for version, device in versions)
