"""State that is divided over the devices of several processes."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxstrategy as js
from jaxstrategy._src.replicas import mesh
from jaxstrategy.checkpoint import CheckpointManager

EVERYTHING = js.StateSharding("state", min_bytes=0)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05))


def first_state(key):
    params = {"w": jax.random.normal(key, (8, 16)), "v": jnp.ones((16, 1))}
    return {"params": params, "opt": OPTIMIZER.init(params), "n": jnp.zeros((), int)}


def parts_are(array, whole):
    """Raise unless this process has parts, each device its own, of `whole`."""
    assert isinstance(array, js.Sharded), array.sharding
    assert not array.is_fully_addressable and array.shape == whole.shape
    for shard in array.addressable_shards:
        assert shard.data.size * jax.device_count() == whole.size
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def mirror(strategy):
    own, whole = jax.process_index(), np.arange(48.0, dtype=np.float32).reshape(3, 16)
    for limit in (mesh._AT_ONCE_BYTES, 8):
        mesh._AT_ONCE_BYTES = limit
        tree = {"host": whole + own, "device": jnp.asarray(whole) + own, "n": 3 + own}
        placed = strategy.mirror(tree)
        parts_are(placed["host"], whole)
        parts_are(placed["device"], whole)
        assert int(placed["n"]) == 3
        again = strategy.mirror(placed)
        parts_are(again["host"], whole)
    read = js.to_host({"x": placed, "text": "as it is"})
    np.testing.assert_array_equal(read["x"]["host"], whole)
    np.testing.assert_array_equal(read["x"]["device"], whole)
    assert read["text"] == "as it is"
    n = strategy.num_replicas_in_sync
    tiled = js.to_host(strategy.gather(placed["host"]))
    np.testing.assert_array_equal(tiled, np.tile(whole, (n, 1)))
    total = js.to_host(strategy.reduce("sum", placed["host"]))
    np.testing.assert_array_equal(total, n * whole)
    results = strategy.experimental_local_results(placed["host"])
    assert len(results) == jax.local_device_count()
    return placed


def alone(strategy, placed):
    """What one process cannot read by itself is refused."""
    one = js.MirroredStrategy(jax.local_devices())
    try:
        one.mirror(placed["host"])
    except js.errors.PlacementError as error:
        assert "this one, which has parts of it. Read it in all processes" in str(error)
    else:
        raise AssertionError("it was read")
    assert "float32" in repr(placed["host"])  # no numbers, and no error


def in_sync(strategy, placed):
    whole = jax.jit(lambda: jnp.ones(8), out_shardings=mesh.replicated_like(
        placed["host"].sharding))()  # fmt: skip
    strategy.assert_in_sync({"parts": placed, "whole": whole})
    local = [shard.data for shard in whole.addressable_shards]
    if jax.process_index() == 1:
        local[0] = jax.device_put(local[0] + 1, local[0].devices().pop())
    bad = jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, local)
    try:
        strategy.assert_in_sync({"parts": placed, "whole": bad})
    except js.errors.OutOfSyncError as error:
        assert list(error.leaves) == ["tree['whole']"], error.leaves
    else:
        raise AssertionError("it was not found")


def init(strategy):
    key, own = jax.random.key(7), jax.process_index()

    def build(key):
        w = jax.random.normal(key, (16, 5))
        return {"w": w, "unit": w / jnp.linalg.norm(w), "zeros": jnp.zeros((8, 2))}

    wanted = jax.tree.map(np.asarray, jax.jit(build)(key))
    state = strategy.init(build, jax.random.key(7 + own))  # that of process 0
    for name, whole in wanted.items():
        parts_are(state[name], whole)
    # What the function refers to may differ: it is process 0's.
    number = np.full((8, 2), 1.0 + own, np.float32)
    parts_are(strategy.init(lambda: number * 2), np.full((8, 2), 2.0))
    parts_are(strategy.init(lambda: jnp.ones((8, 2)) * (1 + own)), np.ones((8, 2)))
    mixed = strategy.init(lambda: {"n": own, "w": jnp.full(8, own)})
    parts_are(mixed["w"], np.zeros(8))
    assert mixed["n"] == own  # as it is: no array


def restored(strategy, folder):
    """The state that one process saved; it is saved again."""
    like = strategy.init(first_state, jax.random.key(1))
    with CheckpointManager(folder / "one", strategy) as manager:
        state = manager.restore(like)
    parts_are(state["params"]["w"], np.load(folder / "w.npy"))
    with CheckpointManager(folder / "several", strategy) as manager:
        manager.save(1, state)


def strategy_of_all():
    """The strategy of the processes, and the folder of the test."""
    strategy = js.MultiWorkerMirroredStrategy(sharding=EVERYTHING)
    return strategy, pathlib.Path(sys.path[0])


def main():
    strategy, folder = strategy_of_all()
    placed = mirror(strategy)
    alone(strategy, placed)
    in_sync(strategy, placed)
    init(strategy)
    restored(strategy, folder)


def read_alone():
    strategy, _ = strategy_of_all()
    placed = strategy.mirror(np.arange(8.0))
    if jax.process_index() == 0:
        js.to_host(placed)
    else:
        strategy.assert_in_sync(strategy.mirror(1.0))
    print("all is well", flush=True)
