"""The versions of this process's replicas, where they can be computed with each other.

JAX does not compute with arrays of different devices, and each replica's version lies
on its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from jaxstrategy.masks import _filled_rows
from jaxstrategy.replicas import _mesh
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.tracing.stages import _in_flight
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import PerReplica

# A larger version stays on its device: each is copied to all devices of the process.
_SMALL_BYTES = 65536


def local_versions(
    values: Sequence[PerReplica], mesh: Mesh
) -> list[tuple[jax.Array, ...]]:
    """Of each value the versions of this process's replicas, only their real rows.

    Args:
      values: they, outside a step.
      mesh: where the replicas of the strategy are.
    """
    own = _own_mesh(mesh)
    small = [i for i, value in enumerate(values) if _is_brought(value, own)]
    everywhere = dict(
        zip(small, _everywhere([values[i] for i in small], own), strict=True)
    )
    if any(isinstance(value.mask, Tracer) for value in values):
        _filled_rows.warn_of_traced("experimental_local_results")
        return [value.values for value in values]
    return [
        _filled_rows.real_versions(
            value, everywhere[i] if i in everywhere else value.values
        )
        for i, value in enumerate(values)
    ]


@functools.lru_cache(maxsize=64)
def _own_mesh(mesh: Mesh) -> Mesh:
    devices = _mesh.own_devices(mesh)
    return mesh if len(devices) == mesh.size else _mesh.mesh_of(devices)


def _is_brought(value: PerReplica, own: Mesh) -> bool:
    """Whether the versions are small, and each lies on a device of `own`."""
    array = _per_replica.contents(value)
    _per_replica.check_alive(array, "A PerReplica")
    if own.size == 1 or not _per_replica.is_placed(array) or not array.shape:
        return False
    bytes_each = int(np.prod(array.shape[1:])) * array.dtype.itemsize
    devices = {shard.device for shard in array.addressable_shards}
    return (
        bytes_each <= _SMALL_BYTES
        and _mesh.is_split(array.sharding)
        and devices == set(_mesh.devices_of(own))
    )


def _everywhere(
    values: Sequence[PerReplica], own: Mesh
) -> tuple[tuple[jax.Array, ...], ...]:
    """The versions of each value, whole on each device of `own`."""
    if not values:
        return ()
    stacked = [_own_part(value.stacked, own) for value in values]
    versions = _unstacked(_mesh.replicated(own))(stacked)
    if _in_flight.needed(own.devices.flat):
        _in_flight.dispatched(versions[0][0])
    return versions


def _own_part(array: jax.Array, own: Mesh) -> jax.Array:
    """The part of a stacked array that this process has, as one of its own."""
    if array.is_fully_addressable:
        return array
    replicas = Replicas.dividing(array)
    assert replicas is not None, "`_is_brought` has asked"
    return Replicas(own).stacked(replicas.versions(array))


@functools.lru_cache(maxsize=64)
def _unstacked(sharding: NamedSharding) -> Any:
    def unstack(arrays: list[jax.Array]) -> tuple[tuple[jax.Array, ...], ...]:
        return tuple(tuple(array[i] for i in range(len(array))) for array in arrays)

    return jax.jit(unstack, out_shardings=sharding)
