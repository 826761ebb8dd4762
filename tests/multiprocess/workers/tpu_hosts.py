"""What each of two processes of four devices does with a `TPUStrategy`."""

import jax
import numpy as np

import jaxstrategy as js
from jaxstrategy.cluster_resolver import TPUClusterResolver
from jaxstrategy.tpu.experimental import (
    DeviceAssignment,
    initialize_tpu_system,
    shutdown_tpu_system,
)


def main():
    topology = initialize_tpu_system()
    assert topology.mesh_shape.tolist() == [8, 1, 1, 1], topology
    assert topology.num_tasks == 2 and topology.num_tpus_per_task == 4
    metadata = TPUClusterResolver().get_tpu_system_metadata()
    assert metadata[:3] == (8, 2, 4) and metadata.devices == jax.devices()
    rank = TPUClusterResolver().task_id
    assert rank == jax.process_index()
    shutdown_tpu_system()

    strategy = js.TPUStrategy(cores_per_replica=2)
    assert strategy.num_replicas_in_sync == 4
    assert strategy.cluster_resolver.process().count == 2
    split = strategy.experimental_split_to_logical_devices
    w0 = np.arange(32, dtype=np.float32).reshape(8, 4)
    w = split(w0, [1, 2])
    assert w.sharding.shard_shape(w.shape) == (8, 2)
    x = np.arange(64, dtype=np.float32).reshape(4, 2, 8) / 64
    own = x[2 * rank : 2 * rank + 2]
    values = iter(own)
    batch = strategy.experimental_distribute_values_from_function(
        lambda _: next(values)
    )

    @strategy.run
    def step(w, x):
        return js.get_replica_context().all_reduce("sum", split(x, [1, 2]) @ w)

    np.testing.assert_allclose(js.to_host(step(w, batch)), (x @ w0).sum(0), rtol=1e-5)

    by_process = DeviceAssignment.build(topology, [4, 1, 1, 1], num_replicas=2)
    whole = js.TPUStrategy(experimental_device_assignment=by_process)
    assert dict(whole.mesh.shape) == {"replica": 2, "core_0": 2, "core_1": 2}
    assert whole._replicas.local_ids == (rank,)
    there = DeviceAssignment(topology, [[[x, 0, 0, 0] for x in (3, 4)]])
    some = DeviceAssignment(topology, [[[0, 0, 0, 0]]])
    for arguments, text in [
        (
            {"experimental_device_assignment": there},
            "of the processes 0, 1. The devices",
        ),
        ({"cores_per_replica": 8}, "of the processes 0, 1. The devices"),
        (
            {"experimental_device_assignment": some},
            "devices of 1 processes, and 2 take",
        ),
    ]:
        try:
            js.TPUStrategy(**arguments)
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)

    alone = js.TPUStrategy(TPUClusterResolver("local"), cores_per_replica=4)
    assert alone.num_replicas_in_sync == 1
    assert set(alone._replicas.all_devices) == set(jax.local_devices())
