"""Strategies of `compat.v1` that tests run under."""

import pytest
from helpers.cases import slow

import jaxstrategy as js
from jaxstrategy.compat import v1


def mirrored(n=2):
    return v1.MirroredStrategy(js.simulate(8)[:n])


def mirrored_on_four():
    return mirrored(4)


def central(n=2):
    return v1.experimental.CentralStorageStrategy(js.simulate(8)[:n])


def one():
    return v1.OneDeviceStrategy("CPU:0")


def shared():
    return v1.Strategy.over(
        js.MirroredStrategy(js.simulate(8)[:2], replicas_per_device=2)
    )


def sharded():
    sharding = js.StateSharding("state", min_bytes=0)
    return v1.Strategy.over(js.MirroredStrategy(js.simulate(8)[:2], sharding=sharding))


def tpu():
    return v1.experimental.TPUStrategy()


def workers():
    alone = js.cluster_resolver.SimpleClusterResolver({})
    return v1.experimental.MultiWorkerMirroredStrategy(cluster_resolver=alone)


of_each_kind = pytest.mark.parametrize(
    "make",
    [mirrored, central, *slow(mirrored_on_four, one, shared, sharded)],
    ids=lambda make: make.__name__,
)


def replica_id():
    return v1.get_replica_context().replica_id_in_sync_group


def each(s, value):
    """The versions of this process's replicas, as numbers of Python."""
    return [float(x) for x in s.experimental_local_results(value)]
