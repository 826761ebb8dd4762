"""Checkpoints that earlier versions have written are restored by this one."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

DATA = pathlib.Path(__file__).parent / "data"


def test_a_checkpoint_of_0_1_0_is_restored(tmp_path, two):
    folder = shutil.copytree(DATA / "v0_1_0", tmp_path / "v0_1_0")
    parts = js.MirroredStrategy(
        jax.devices()[:2], sharding=js.StateSharding("state", min_bytes=0)
    )
    with two.scope():
        count = js.Variable(np.zeros(2, np.float32), name="count")
    like = {
        "w": two.mirror(np.zeros((2, 3), np.float32)),
        "half": two.mirror(jnp.zeros(2, jnp.bfloat16)),
        "parts": parts.mirror(np.zeros(16, np.int32)),  # of four parts before
        "own": two.per_replica(np.zeros((2, 2), np.float32)),
        "count": count,
        "key": jax.random.key(0),
        "host": np.zeros(2, bool),
        "step": 0,
        "rate": 0.0,
        "name": "",
    }
    with CheckpointManager(folder) as manager:
        assert manager.latest_step() == 5
        found = manager.restore(like)
    wanted = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3) / 4,
        "half": np.asarray(jnp.asarray([0.5, -3.0], jnp.bfloat16)),
        "parts": np.arange(16, dtype=np.int32),
        "own": np.float32([[1, 2], [3, 4]]),
        "count": np.float32([1.5, -2.0]),
        "key": np.asarray(jax.random.key_data(jax.random.key(7))),
        "host": np.array([True, False]),
    }
    arrays = {name: found[name] for name in wanted}
    assert isinstance(arrays["own"], js.PerReplica)
    assert isinstance(arrays["parts"], js.Sharded)
    assert arrays["parts"].sharding.shard_shape((16,)) == (8,)
    assert arrays["count"] is count
    arrays["own"] = arrays["own"].stacked
    arrays["count"] = count.numpy()
    arrays["key"] = jax.random.key_data(arrays["key"])
    for name, value in wanted.items():
        array = np.asarray(arrays[name])
        assert array.dtype == value.dtype
        np.testing.assert_array_equal(array, value)
    rest = {name: found[name] for name in ("step", "rate", "name")}
    assert rest == {"step": 3, "rate": 0.25, "name": "adam"}
