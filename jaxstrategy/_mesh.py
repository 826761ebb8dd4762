"""Where replicas live: a one-dimensional mesh with one device a replica.

This module alone spells the axis name and `PartitionSpec`s; the rest of the package
asks it for a sharding by meaning: `replicated` or `split`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxstrategy._devices import Device

REPLICA_AXIS = "replica"

SAME = PartitionSpec()
SPLIT = PartitionSpec(REPLICA_AXIS)


def mesh_of(devices: Sequence[Device]) -> Mesh:
    """A mesh with one replica per device, in the order given."""
    # Auto, not Explicit (the default of `jax.make_mesh`), which refuses NumPy inputs.
    return Mesh(np.asarray(devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))


def devices_of(mesh: Mesh) -> tuple[Device, ...]:
    """The devices of `mesh` in replica order."""
    return tuple(mesh.devices.flat)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every replica holds the whole array."""
    return NamedSharding(mesh, SAME)


def split(mesh: Mesh) -> NamedSharding:
    """Replica i holds entry i of the first dimension."""
    return NamedSharding(mesh, SPLIT)


def replicated_like(sharding: Sharding) -> Sharding:
    """The whole array on each device that `sharding` uses."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, SAME)
    return replicated(mesh_of(sorted(sharding.device_set, key=lambda d: d.id)))


def lies_as(array: jax.Array, wanted: NamedSharding) -> bool:
    """Whether `array` lies where `wanted` says, and JAX knows it as being on a mesh."""
    # On one device a plain array lies there too, but has another type to JAX.
    return isinstance(array.sharding, NamedSharding) and (
        array.sharding.is_equivalent_to(wanted, array.ndim)
    )


def is_replicated(sharding: Sharding) -> bool:
    """Whether `sharding` puts the same whole array on every replica of some mesh."""
    return (
        isinstance(sharding, NamedSharding)
        and REPLICA_AXIS in sharding.mesh.axis_names
        and sharding.is_fully_replicated
    )


def is_split(sharding: Sharding) -> bool:
    """Whether `sharding` divides an array over the replicas of some mesh."""
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return False
    named = (entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec)
    return any(REPLICA_AXIS in entry for entry in named)
