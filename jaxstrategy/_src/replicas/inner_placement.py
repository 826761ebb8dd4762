"""Placements of arrays that lie divided over the devices of each replica."""

from __future__ import annotations

from typing import TypeAlias

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxstrategy._src.replicas import mesh as _mesh
from jaxstrategy._src.replicas.replicas import SAME, SPLIT, Lies, Replicas

InnerSpec: TypeAlias = PartitionSpec
"""The division of an array over inner axes, and over no others."""

WHOLE = InnerSpec()


def lying_like(value: object, replicas: Replicas, lies: Lies = SAME) -> NamedSharding:
    """How an array lies over the replicas, and over inner axes as `value` does.

    Over these it is whole if `value` lies on another mesh, or nowhere yet.

    Args:
      value: an array, or the type of one, of as many dimensions.
      replicas: those of the strategy.
      lies: over the replicas.
    """
    return with_inner(inner_spec(value, replicas), replicas, lies)


def inner_spec(value: object, replicas: Replicas) -> InnerSpec:
    """The division of `value` over inner axes; that over replicas is left out."""
    # The single replica of no strategy has an inner axis of one device.
    if not (replicas.inner_axes and replicas.axes) or isinstance(value, Tracer):
        return WHOLE
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return WHOLE
    if sharding.mesh != replicas.mesh and not _is_of_one_replica(sharding, replicas):
        return WHOLE
    return _mesh.along(sharding.spec, replicas.inner_axes)


def inner_dimensions(value: object, replicas: Replicas) -> list[int]:
    """The dimensions of `value` that inner axes divide."""
    return divided_dimensions(inner_spec(value, replicas))


def divided_dimensions(inner: InnerSpec) -> list[int]:
    """The dimensions that inner axes divide."""
    return [i for i, names in enumerate(inner) if names is not None]


def _is_of_one_replica(sharding: NamedSharding, replicas: Replicas) -> bool:
    """Whether it is the placement of one replica's version or copy."""
    groups = (replicas.mesh_of(i) for i in replicas.own)
    return any(sharding.mesh == mesh for mesh in groups)


def replicas_with(sharding: Sharding) -> Replicas | None:
    """Those on each of which `sharding` puts the same array, if there are any."""
    if not isinstance(sharding, NamedSharding) or not _mesh.is_replicated(sharding):
        return None
    assert isinstance(sharding.mesh, Mesh), "arrays lie on devices"
    return Replicas(sharding.mesh)


def own_copy(array: jax.Array) -> jax.Array:
    """What the first replica of this process has of an array that is equal on all.

    An array that is not, or that this process has all of, as it is.
    """
    if array.is_fully_replicated:
        return array.addressable_data(0)
    replicas = replicas_with(array.sharding)
    if array.is_fully_addressable or replicas is None:
        return array
    return replicas.copies(array)[0]


def with_inner(
    inner: InnerSpec, replicas: Replicas, lies: Lies = SAME
) -> NamedSharding:
    """How an array lies over the replicas, and over inner axes as `inner` says.

    The first dimension of `[replica, ...]` is divided over the replicas only.
    """
    if lies is SPLIT:
        inner = of_stacked(of_versions(inner))
    if not any(inner):
        is_along = isinstance(lies, int)
        return replicas.sharding_along(lies) if is_along else replicas.sharding(lies)
    base = replicas.spec_of(lies)
    longest = range(max(len(base), len(inner)))
    both = [[_mesh.names(s[i]) for s in (base, inner) if i < len(s)] for i in longest]
    return NamedSharding(replicas.mesh, _mesh.spec_of(sum(e, ()) for e in both))


def of_versions(inner: InnerSpec) -> InnerSpec:
    """The division of versions `[...]`, of that of an array `[replica, ...]`."""
    return PartitionSpec(*inner[1:])


def of_stacked(inner: InnerSpec) -> InnerSpec:
    """The division of an array `[replica, ...]`, of that of its versions `[...]`."""
    return PartitionSpec(None, *inner) if any(inner) else WHOLE
