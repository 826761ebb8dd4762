"""What a strategy says of itself whose replicas have several devices, or share one."""

import copy
import re

import jax
import numpy as np
import pytest

import jaxstrategy as js


@pytest.fixture
def cores():
    return js.MirroredStrategy(logical_axes={"core": 2})


@pytest.fixture
def shared():
    devices = jax.devices()[:2]
    return js.MirroredStrategy(devices, replicas_per_device=3)


def cells(thing):
    """The rows of its table in a notebook, and of each the cells."""
    rows = re.findall("<tr.*?>(.*?)</tr>", thing._repr_html_())
    return [re.findall("<td.*?>(.*?)</td>", row) for row in rows][1:]


def test_a_strategy_shows_all_devices_of_each_replica(cores, shared):
    wanted = ["cpu:0, cpu:1", "cpu:2, cpu:3", "cpu:4, cpu:5", "cpu:6, cpu:7"]
    assert cells(cores) == [[str(i), name, "cpu"] for i, name in enumerate(wanted)]
    both = ["cpu:0"] * 3 + ["cpu:1"] * 3
    assert cells(shared) == [[str(i), name, "cpu"] for i, name in enumerate(both)]
    squares = js.MirroredStrategy(logical_axes={"row": 2, "column": 2})
    assert cells(squares) == [["0", "cpu:0..3", "cpu"], ["1", "cpu:4..7", "cpu"]]


def test_a_strategy_is_printed_with_what_replicas_and_devices_are_to_each_other(
    cores, shared
):
    assert repr(cores) == "MirroredStrategy(4 replicas of {'core': 2} on cpu:0..7)"
    some = js.MirroredStrategy(["CPU:3", "CPU:1"], logical_axes={"core": 2})
    assert repr(some) == "MirroredStrategy(1 replica of {'core': 2} on cpu:3, cpu:1)"
    assert repr(shared) == (
        "MirroredStrategy(6 replicas, 3 on each device, on cpu:0, cpu:1)"
    )
    central = js.experimental.CentralStorageStrategy(replicas_per_device=2)
    assert repr(central) == (
        "CentralStorageStrategy(16 replicas, 2 on each device, on cpu:0..7)"
    )
    alone = js.cluster_resolver.SimpleClusterResolver({})
    axes = {"a": 4, "b": 2}
    assert repr(js.MultiWorkerMirroredStrategy(alone, logical_axes=axes)) == (
        "MultiWorkerMirroredStrategy(1 replica of {'a': 4, 'b': 2} on cpu:0..7)"
    )


def test_versions_are_shown_where_each_lies(cores, shared):
    of_cores = cores.per_replica(np.ones((4, 3), np.float32))
    assert repr(of_cores) == "PerReplica(float32[3] on cpu:0..7)"
    assert cells(of_cores)[1] == ["1", "cpu:2, cpu:3", "[1., 1., 1.]"]
    of_shared = shared.per_replica(np.ones((6, 3), np.float32))
    assert repr(of_shared) == "PerReplica(float32[3] on cpu:0, cpu:1)"
    places = ["cpu:0"] * 3 + ["cpu:1"] * 3
    assert [row[:2] for row in cells(of_shared)] == [
        [str(i), name] for i, name in enumerate(places)
    ]


def test_messages_name_each_device_once(shared):
    other = js.MirroredStrategy(jax.devices()[4:])
    x = other.per_replica(np.ones(4, np.float32))
    with pytest.raises(js.errors.PlacementError, match="6 replicas on cpu:0, cpu:1\\."):
        shared.run(lambda x: x, (x,))
    with pytest.raises(js.errors.PlacementError, match="of this strategy's, cpu:0,"):
        shared.assert_in_sync(other.mirror(1.0))


def test_a_deep_copy_has_the_same_replicas(cores, shared):
    for strategy in (cores, shared):
        twin = copy.deepcopy(strategy)
        assert repr(twin) == repr(strategy) and twin._replicas == strategy._replicas
        count = strategy.num_replicas_in_sync
        x = np.arange(count, dtype=np.float32)
        total = twin.reduce("sum", strategy.per_replica(x))
        assert total == x.sum()
