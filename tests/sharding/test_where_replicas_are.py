"""Which devices each replica has, and what each has of an array, in all layouts.

The oracle is NumPy: replica i of an array of shape `[replica, ...]` has entry i.
"""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js


def layouts():
    """Of each a strategy, and the numbers of the devices of each replica."""
    devices = jax.devices()
    yield js.MirroredStrategy(devices[::-1]), [[i] for i in reversed(range(8))]
    axes = {"row": 2, "column": 2}
    yield js.MirroredStrategy(logical_axes=axes), [[0, 1, 2, 3], [4, 5, 6, 7]]
    three = js.MirroredStrategy(devices[:2], replicas_per_device=3)
    yield three, [[i // 3] for i in range(6)]


def test_replicas_have_their_devices_their_entries_and_their_numbers():
    for strategy, wanted in layouts():
        n = len(wanted)
        assert strategy.num_replicas_in_sync == n, strategy
        assert [d.id for d in strategy.devices] == [row[0] for row in wanted]
        x = np.arange(n * 6.0, dtype=np.float32).reshape(-1, 2, 3)
        for given in (x, list(x)):
            value = strategy.per_replica(given)
            np.testing.assert_array_equal(value.stacked, x)
            for version, row, devices in zip(value.values, x, wanted, strict=True):
                np.testing.assert_array_equal(version, row)
                assert {d.id for d in version.devices()} == set(devices), strategy
        # Versions that lie elsewhere come to their replicas.
        elsewhere = [jax.device_put(row, jax.devices()[5]) for row in x]
        np.testing.assert_array_equal(strategy.per_replica(elsewhere).stacked, x)

        def step(x):
            context = js.get_replica_context()
            number = context.replica_id_in_sync_group
            return number, context.all_reduce("sum", 2**number), x.sum()

        number, total, sums = strategy.run(step, (strategy.per_replica(x),))
        assert np.asarray(number.stacked).tolist() == list(range(n))
        assert total == 2**n - 1
        np.testing.assert_array_equal(sums.stacked, x.sum((1, 2)))
        copies = strategy.experimental_local_results(strategy.mirror(x[0]))
        assert len(copies) == n
        for copy in copies:
            np.testing.assert_array_equal(copy, x[0])


def test_an_array_divided_along_another_dimension_is_no_replicas(four):
    columns = NamedSharding(four.mesh, P(None, "replica"))
    x = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    value = js.PerReplica(jax.device_put(x, columns))
    for version, row in zip(value.values, x, strict=True):
        np.testing.assert_array_equal(version, row)


def test_versions_of_an_array_divided_inside_replicas_stay_divided():
    strategy = js.MirroredStrategy(logical_axes={"core": 4})
    x = np.arange(48.0, dtype=np.float32).reshape(2, 3, 8)
    where = NamedSharding(strategy.mesh, P("replica", None, "core"))
    value = js.PerReplica(jax.device_put(x, where))
    for version, row in zip(value.values, x, strict=True):
        np.testing.assert_array_equal(version, row)
        assert [s.data.shape for s in version.addressable_shards] == [(3, 2)] * 4
