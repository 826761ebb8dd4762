"""Replicas of several devices, or that share one, in several processes."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager
from workers import LAYOUT

KERNEL = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
ROWS = np.random.default_rng(2).normal(size=(12, 4)).astype(np.float32)


def refused(**layout):
    """The words in which a layout is refused."""
    try:
        js.MultiWorkerMirroredStrategy(**layout)
    except (ValueError, TypeError) as error:
        return str(error)
    raise AssertionError(f"{layout} was taken")


def what_processes_share_is_refused():
    """A replica of two processes, and then different replicas in each."""
    for sizes in ({"core": 2}, {"a": 2, "b": 1}):
        text = refused(logical_axes=sizes)
        assert text.startswith(f"`logical_axes` was {sizes}: replica "), text
        assert "would have devices of processes 0, 1. Give sizes whose" in text
    assert "2 are no multiple of that" in refused(logical_axes={"core": 4})
    assert "Give one of the two" in refused(
        logical_axes={"core": 1}, replicas_per_device=2
    )
    try:
        js.MultiWorkerMirroredStrategy(replicas_per_device=1 + jax.process_index())
    except js.ClusterError as error:
        assert "process 0: `make a strategy of 2 replicas` (" in str(error)
        told = "process 1: `make a strategy of 4 replicas, 2 on each device` ("
        assert told in str(error), error
    else:
        raise AssertionError("it was taken")


def step(w, x):
    """A step along the gradient of half the sum of squares, over all replicas."""

    def loss(w):
        return ((x @ w) ** 2).sum() / 2

    value, gradient = jax.value_and_grad(loss)(w)
    context = js.get_replica_context()
    value, gradient = context.all_reduce("sum", (value, gradient))
    return w - 0.01 * gradient, value


def descent(steps):
    """What `step` makes of all rows, in NumPy."""
    w, seen = KERNEL, []
    for _ in range(steps):
        seen.append(((ROWS @ w) ** 2).sum() / 2)
        w = w - 0.01 * ROWS.T @ (ROWS @ w)
    return w, seen


def replicas_know_their_devices(s):
    replicas, own = s._replicas, jax.process_index()
    here = replicas.count // jax.process_count()
    first = own * here
    assert replicas.local_ids == tuple(range(first, first + here))
    assert not replicas.are_all_local
    devices = [d for i in replicas.local_ids for d in replicas.devices_of(i)]
    assert set(devices) == set(jax.local_devices())
    assert [d for d in replicas.local_devices] == [
        s.devices[i] for i in replicas.local_ids
    ]
    assert f"process {own} of 2" in repr(s)


def batches_lie_on_all_devices_of_a_replica(s):
    dataset = s.experimental_distribute_dataset(
        js.batches(ROWS, 12), js.InputOptions(experimental_fetch_to_device=True)
    )
    for batch in dataset:
        assert batch.stacked.sharding.device_set == set(s.mesh.devices.flat)
        for i, version in zip(s._replicas.local_ids, batch.values, strict=True):
            each = 12 // s.num_replicas_in_sync
            assert version.devices() == set(s._replicas.devices_of(i))
            np.testing.assert_array_equal(version, ROWS[i * each : (i + 1) * each])


def placed_kernel(s):
    """The kernel over the devices of each replica, if it has several."""
    where = NamedSharding(s.mesh, PartitionSpec(None, "core" if LAYOUT_HAS else None))
    return jax.make_array_from_callback(KERNEL.shape, where, lambda i: KERNEL[i])


LAYOUT_HAS = "logical_axes" in LAYOUT


def trains(s, folder):
    w = first = placed_kernel(s)
    run, steps = s.run(step), 3
    wanted, values = descent(steps)
    x = s.per_replica(ROWS.reshape(s.num_replicas_in_sync, -1, 4))
    for value in values:
        w, found = run(w, x)
        np.testing.assert_allclose(found, value, rtol=1e-4)
    np.testing.assert_allclose(js.to_host(w), wanted, rtol=1e-4, atol=1e-5)
    if LAYOUT_HAS:
        assert w.sharding.shard_shape(w.shape) == first.sharding.shard_shape(w.shape)
    s.assert_in_sync({"w": w, "value": found})
    with CheckpointManager(folder / "several", s) as manager:
        manager.save(1, {"w": w, "n": jnp.int32(steps)})
    with CheckpointManager(folder / "one", s) as manager:
        back = manager.restore({"w": first, "n": s.mirror(0)})
    assert back["w"].sharding.is_equivalent_to(first.sharding, 2)
    np.testing.assert_array_equal(js.to_host(back["w"]), KERNEL * 2)
    assert int(back["n"]) == 7


def main():
    if jax.local_device_count() == 1:
        what_processes_share_is_refused()
    s = js.MultiWorkerMirroredStrategy(**LAYOUT)
    replicas_know_their_devices(s)
    batches_lie_on_all_devices_of_a_replica(s)
    trains(s, pathlib.Path(sys.path[0]))
