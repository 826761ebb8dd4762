"""`Replicas`: how many, on which devices, and what each has of an array.

The oracle is NumPy: replica i of an array of shape `[replica, ...]` has entry i.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxstrategy as js
from jaxstrategy.replicas._replicas import SAME, SPLIT, Replicas
from jaxstrategy.tracing._on_replicas import on_replicas


def mesh(shape, names):
    return Mesh(np.array(jax.devices()).reshape(shape), names)


# Of each the replicas, and the numbers of the devices of each replica.
KINDS = {
    "one device each": (Replicas.on(jax.devices()), [[i] for i in range(8)]),
    "in another order": (
        Replicas.on(jax.devices()[::-1]),
        [[i] for i in reversed(range(8))],
    ),
    "two devices each": (
        Replicas(mesh((4, 2), ("replica", "shard"))),
        [[0, 1], [2, 3], [4, 5], [6, 7]],
    ),
    "the inner axis first": (
        Replicas(mesh((2, 4), ("shard", "replica"))),
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    "two inner axes": (
        Replicas(mesh((2, 2, 2), ("row", "replica", "column"))),
        [[0, 1, 4, 5], [2, 3, 6, 7]],
    ),
    "two axes of replicas": (
        Replicas(mesh((2, 2, 2), ("replica", "shard", "host")), ("host", "replica")),
        [[0, 2], [4, 6], [1, 3], [5, 7]],
    ),
    "three on a device": (
        Replicas(mesh((8,), ("replica",)), per_device=3),
        [[i // 3] for i in range(24)],
    ),
    "two on each two devices": (
        Replicas(mesh((4, 2), ("replica", "shard")), per_device=2),
        [[i // 2 * 2, i // 2 * 2 + 1] for i in range(8)],
    ),
    "of no strategy": (
        Replicas(Mesh(np.array(jax.devices()[:1]), ("replica",)), axes=()),
        [[0]],
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def test_each_replica_has_its_devices(kind):
    replicas, wanted = kind
    assert replicas.count == len(wanted)
    found = [[d.id for d in replicas.devices_of(i)] for i in range(replicas.count)]
    assert found == wanted
    assert [d.id for d in replicas.devices] == [row[0] for row in wanted]
    assert replicas.own == tuple(range(len(wanted))) and replicas.are_all_own
    assert [d.id for d in replicas.own_devices] == [row[0] for row in wanted]


def test_the_shardings_say_which_device_has_which_entries(kind):
    replicas, wanted = kind
    n = replicas.count
    split = replicas.sharding(SPLIT).devices_indices_map((n, 3))
    rows = np.arange(n)
    for device, index in split.items():
        assert [i for i in rows if device.id in wanted[i]] == list(rows[index[0]])
    same = replicas.sharding(SAME)
    assert same.is_fully_replicated
    assert {d.id for d in same.device_set} == {i for row in wanted for i in row}


def test_versions_are_the_entries_each_on_its_replicas_devices(kind):
    replicas, wanted = kind
    x = np.arange(replicas.count * 6.0, dtype=np.float32).reshape(-1, 2, 3)
    versions = replicas.versions(jax.device_put(x, replicas.sharding(SPLIT)))
    assert len(versions) == replicas.count
    for version, row, devices in zip(versions, x, wanted, strict=True):
        np.testing.assert_array_equal(version, row)
        assert {d.id for d in version.devices()} == set(devices)


def test_stacked_is_the_inverse_of_versions(kind):
    replicas, wanted = kind
    x = np.arange(replicas.count * 2, dtype=np.int32).reshape(-1, 2)
    stacked = replicas.stacked(list(x))
    assert stacked.sharding == replicas.sharding(SPLIT)
    np.testing.assert_array_equal(stacked, x)
    again = replicas.stacked(
        [
            jax.device_put(row, jax.devices()[i[-1]])
            for row, i in zip(x, wanted, strict=True)
        ]
    )
    np.testing.assert_array_equal(again, x)


def test_an_array_says_over_which_replicas_it_is_divided(kind):
    replicas, _ = kind
    x = jax.device_put(np.zeros((replicas.count, 2)), replicas.sharding(SPLIT))
    wanted = replicas if replicas.axes else None
    assert Replicas.dividing(x) == wanted
    assert Replicas.dividing(jax.device_put(x, replicas.sharding(SAME))) is None
    assert Replicas.dividing(jnp.zeros(3)) is None


def test_an_array_divided_along_another_dimension_is_no_replicas(four):
    columns = NamedSharding(four.mesh, P(None, "replica"))
    x = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    value = js.PerReplica(jax.device_put(x, columns))
    assert Replicas.dividing(value.stacked) is None
    for version, row in zip(value.values, x, strict=True):
        np.testing.assert_array_equal(version, row)


def test_versions_of_an_array_divided_inside_replicas_stay_divided():
    replicas = Replicas(mesh((2, 4), ("replica", "shard")))
    x = np.arange(48.0, dtype=np.float32).reshape(2, 3, 8)
    where = NamedSharding(replicas.mesh, P("replica", None, "shard"))
    versions = replicas.versions(jax.device_put(x, where))
    for version, row in zip(versions, x, strict=True):
        np.testing.assert_array_equal(version, row)
        assert [s.data.shape for s in version.addressable_shards] == [(3, 2)] * 4


def test_copies_are_the_whole_array_on_each_replicas_devices(kind):
    replicas, wanted = kind
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    copies = replicas.copies(jax.device_put(x, replicas.sharding(SAME)))
    assert [{d.id for d in copy.devices()} for copy in copies] == [
        set(row) for row in wanted
    ]
    for copy in copies:
        np.testing.assert_array_equal(copy, x)


def test_stacked_values_of_two_devices_each_are_read_as_versions():
    replicas = Replicas(mesh((4, 2), ("replica", "shard")), per_device=2)
    x = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    value = js.PerReplica(replicas.stacked(list(x)))
    assert value.num_replicas == 8 and repr(value).endswith("on cpu:0..7)")
    for i, version in enumerate(value.values):
        np.testing.assert_array_equal(version, x[i])
        np.testing.assert_array_equal(value.local(i), x[i])


def test_versions_of_another_division_are_an_error():
    replicas = Replicas.on(jax.devices()[:4])
    x = np.zeros((4, 2))
    message = r"shape \(4, 2\) lies as .*, and not with entry 0 on \(CpuDevice\(id=0\)"
    with pytest.raises(ValueError, match=message):
        replicas.versions(jax.device_put(x, replicas.sharding(SAME)))
    other = Replicas.on(jax.devices()[:4][::-1])
    with pytest.raises(ValueError, match=message):
        replicas.versions(jax.device_put(x, other.sharding(SPLIT)))
    with pytest.raises(ValueError, match="not with entry 0"):
        Replicas.on(jax.devices()).versions(jax.device_put(x, jax.devices()[7]))


def test_index_counts_the_replicas_inside_a_step(kind):
    replicas, wanted = kind
    step = on_replicas(lambda x: x * 0 + replicas.index(), replicas, [SPLIT], SPLIT)
    found = jax.jit(step)(np.zeros(replicas.count, np.int32))
    assert list(np.asarray(found)) == list(range(len(wanted)))


def test_a_sum_over_the_collective_axes_is_over_all_replicas_once(kind):
    replicas, wanted = kind

    def total(x):
        return jax.lax.psum(x, replicas.collective_axes) if replicas.axes else x

    step = on_replicas(total, replicas, [SPLIT], SPLIT)
    x = 2 ** np.arange(replicas.count, dtype=np.int32)
    assert set(np.asarray(jax.jit(step)(x)).tolist()) == {2 ** len(wanted) - 1}


def test_replicas_are_keys():
    first, second = Replicas.on(jax.devices()[:2]), Replicas.on(jax.devices()[:2])
    assert first == second and hash(first) == hash(second)
    assert first != Replicas.on(jax.devices()[:2][::-1])


def test_the_replicas_of_strategies(strategy):
    replicas = strategy._replicas
    assert replicas.count == strategy.num_replicas_in_sync
    assert replicas.devices == strategy.devices and replicas.mesh == strategy.mesh
    assert strategy._parameter_replicas == replicas


def test_central_storage_keeps_its_parameters_elsewhere():
    central = js.experimental.CentralStorageStrategy(jax.devices()[:4], "CPU:7")
    assert central._replicas == Replicas.on(jax.devices()[:4])
    assert central._parameter_replicas == Replicas.on(jax.devices()[7:])


def test_of_no_strategy_there_is_one():
    replicas = js.get_strategy()._replicas
    assert (replicas.count, replicas.axes, replicas.index()) == (1, (), 0)
