"""Strategies with the methods of TensorFlow 1, of all kinds."""

import jax
import pytest

import jaxstrategy as js
from jaxstrategy.compat import v1


def of_kind(kind, n=1):
    """A strategy of TensorFlow 1 of `n` replicas."""
    devices = jax.devices()
    if kind == "mirrored":
        return v1.MirroredStrategy(devices[:n])
    if kind == "central":
        return v1.experimental.CentralStorageStrategy(devices[:n], devices[5])
    if kind == "one":
        return v1.OneDeviceStrategy(devices[3])
    assert kind == "default"
    return v1.get_strategy()


KINDS = (("mirrored", 2), ("central", 2), ("default", 1))

each_kind = pytest.mark.parametrize(
    "kind, n", KINDS, ids=[f"{kind}-{n}" for kind, n in KINDS]
)


def versions(strategy, value):
    """What each replica has, as lists."""
    results = strategy.experimental_local_results(value)
    return [jax.numpy.asarray(result).tolist() for result in results]


def identity(x):
    return x


def replica_id():
    return js.get_replica_context().replica_id_in_sync_group
