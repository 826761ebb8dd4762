"""Two processes save what one restores, and restore what one saved."""

import pathlib
import resource
import sys
import warnings

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointError, CheckpointManager, MismatchError
from workers import LAYOUT

ROWS = np.arange(80.0, dtype=np.float32)
AGGREGATIONS = ("sum", "mean", "only_first_replica")


def values(seed):
    """What a state holds, in NumPy."""
    draw = np.random.default_rng(seed)
    return {
        "mirrored": draw.normal(size=(5, 3)).astype(np.float32),
        "split": draw.random((64, 512), np.float32),
        "copies": draw.integers(0, 9, 4).astype(np.float32),
    }


def state_of(strategy, seed):
    """Everything of which processes have different parts, or which they share."""
    host = values(seed)
    replicas = strategy.num_replicas_in_sync
    rows = NamedSharding(strategy.mesh, PartitionSpec("replica"))
    state = {
        "mirrored": strategy.mirror(host["mirrored"]),
        "split": jax.make_array_from_callback(
            host["split"].shape, rows, lambda index: host["split"][index]
        ),
        "key": strategy.mirror(jax.random.key(seed)),
        "host": host["mirrored"] * 2,
        "epoch": seed,
    }
    with strategy.scope():
        state["variable"] = js.Variable(host["mirrored"], aggregation="mean")
        for name in AGGREGATIONS:
            state[name] = js.Variable(0.0, synchronization="on_read", aggregation=name)

    @strategy.run
    def fill(copies):
        own = copies[js.get_replica_context().replica_id_in_sync_group]
        for name in AGGREGATIONS:
            state[name].assign(own)

    fill(strategy.mirror(host["copies"][:replicas]))
    data = js.batches(ROWS, batch_size=8, shuffle=3)
    state["data"] = iter(strategy.experimental_distribute_dataset(data))
    return state


def check(state, seed, saved_by):
    """Raise unless the state is that of `seed`, saved by so many replicas."""
    host = values(seed)
    split = state["split"]
    for shard in split.addressable_shards:
        np.testing.assert_array_equal(shard.data, host["split"][shard.index])
    here = {s.index[0].start: s.data.shape[0] for s in split.addressable_shards}
    assert sum(here.values()) < 64 or jax.process_count() == 1
    for name in ("mirrored", "variable"):
        value = state[name].numpy() if name == "variable" else state[name]
        np.testing.assert_array_equal(np.asarray(value), host["mirrored"])
    np.testing.assert_array_equal(state["host"], host["mirrored"] * 2)
    assert np.asarray(jax.random.key_data(state["key"])).tolist() == [0, seed]
    assert state["epoch"] == seed
    copies = host["copies"][:saved_by]
    wanted = {"sum": copies.sum(), "mean": copies.mean(), AGGREGATIONS[2]: copies[0]}
    for name, number in wanted.items():
        assert state[name].numpy() == number, name


def squares(x):
    return js.masked_sum(x**2)


def seen(strategy, batch):
    """The sum of squares of a batch, which all processes know."""
    return float(strategy.reduce("sum", strategy.run(squares, (batch,))))


def only_in_one_way(strategy, folder):
    """What one process saved is restored; its `PerReplica` cannot be."""
    state = state_of(strategy, 5)
    with CheckpointManager(folder / "one", strategy) as manager:
        state = manager.restore(state)
        check(state, 1, saved_by=2)
        told = ", ".join(str(seen(strategy, batch)) for batch in state["data"])
        print(f"one: {told}", flush=True)
    with CheckpointManager(folder / "copies", strategy) as manager:
        like = {"x": state["sum"].distributed()}
        try:
            manager.restore(like)
        except MismatchError as error:
            print(f"refused: {error.differing[0]}", flush=True)


def kept(strategy, folder):
    """The last two and the best are kept; what was saved is restored."""
    scores = [1, 9, 3, 4, 5]
    with CheckpointManager(
        folder / "two", strategy, keep=2, best=("score", "max")
    ) as manager:
        for step, score in enumerate(scores):
            state = state_of(strategy, step)
            next(state["data"])
            manager.save(step, state, metrics={"score": score})
            state["data"].close()
        manager.wait()
        assert manager.all_steps() == [1, 3, 4] and manager.best_step() == 1
        state = state_of(strategy, 7)
        for step in (1, 4):
            state = manager.restore(state, step)
            check(state, step, saved_by=4)
        told = ", ".join(str(seen(strategy, batch)) for batch in state["data"])
        print(f"two: {told}", flush=True)


def damaged(strategy, folder):
    """A file that only one process looks at is damaged: all use the one before."""
    state = {"w": state_of(strategy, 1)["split"], "n": 1}
    with CheckpointManager(folder / "damaged", strategy) as manager:
        for step in (1, 2):
            manager.save(step, {**state, "n": step})
        manager.wait()
        files = manager.record(2).files
        named = sorted(name for name in files if files[name][0])
        manager.all_steps()  # all have read the record
        if strategy.process_index == 0:
            # Processes take turns in this order when they verify.
            name = next(n for n in named if sorted(files).index(n) % 2)
            path = folder / "damaged" / "2" / name
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        manager.all_steps()  # all wait for the first process
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert manager.restore(state)["n"] == 1
        assert "another checksum" in str(caught[-1].message)


def full_disk_of_one(strategy, folder):
    """One process cannot write: none waits for it, and the next save is good."""
    state = {"w": state_of(strategy, 1)["split"], "n": 1}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointManager(folder / "full", strategy) as manager:
        manager.save(1, state)
        manager.wait()
        for full in (1, 0):
            if strategy.process_index == full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
            told = ""
            try:
                manager.save(2 + full, state)
                manager.wait()
            except CheckpointError as error:
                told = str(error).splitlines()[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            print(f"full {full}: {told}", flush=True)
            assert manager.all_steps() == [1]
        assert manager.save(4, state)
        manager.wait()
        assert manager.all_steps() == [1, 4]


def main():
    folder = pathlib.Path(sys.path[0])
    strategy = js.MultiWorkerMirroredStrategy(**LAYOUT)
    for part in (only_in_one_way, kept, damaged, full_disk_of_one):
        part(strategy, folder)
