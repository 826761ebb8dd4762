"""Arrays sharded over the inner axes of the mesh, the devices of one replica."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeGuard

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxstrategy._src.replicas import mesh as _mesh
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    LayoutOrDimension,
    ReplicaLayout,
    Replicas,
)
from jaxstrategy._src.text import shown

InnerSpec: TypeAlias = PartitionSpec
"""A spec over inner axes, and over no others."""

WHOLE = InnerSpec()


def sharding_like(
    value: object, replicas: Replicas, layout: LayoutOrDimension = REPLICATED
) -> NamedSharding:
    """The sharding of a layout over the replicas, and of `value` over inner axes."""
    return with_inner(inner_spec(value, replicas), replicas, layout)


def inner_spec(value: object, replicas: Replicas) -> InnerSpec:
    """The spec of `value` over inner axes; `WHOLE` if it is on another mesh."""
    # The single replica of no strategy has an inner axis of one device.
    if not (replicas.inner_axes and replicas.axes) or isinstance(value, Tracer):
        return WHOLE
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return WHOLE
    if sharding.mesh != replicas.mesh:
        # The version or copy of one replica has a mesh of that replica alone.
        if all(sharding.mesh != replicas.mesh_of(i) for i in replicas.local_ids):
            return WHOLE
    return _mesh.spec_over(sharding.spec, replicas.inner_axes)


def inner_dimensions(value: object, replicas: Replicas) -> list[int]:
    """The dimensions of `value` that are sharded over inner axes."""
    return divided_dimensions(inner_spec(value, replicas))


def divided_dimensions(inner: InnerSpec) -> list[int]:
    return [i for i, names in enumerate(inner) if names is not None]


def replicas_with(sharding: Sharding) -> Replicas | None:
    """The replicas over which `sharding` replicates, if it does so."""
    if not isinstance(sharding, NamedSharding) or not _mesh.is_replicated(sharding):
        return None
    assert isinstance(sharding.mesh, Mesh), "arrays lie on devices"
    return Replicas(sharding.mesh)


def local_copy(array: jax.Array) -> jax.Array:
    """The copy of a replicated array that the first replica of this process has.

    Other arrays, and arrays of one process, as they are.
    """
    if array.is_fully_replicated:
        return array.addressable_data(0)
    replicas = replicas_with(array.sharding)
    if array.is_fully_addressable or replicas is None:
        return array
    return replicas.copies(array)[0]


def with_inner(
    inner: InnerSpec, replicas: Replicas, layout: LayoutOrDimension = REPLICATED
) -> NamedSharding:
    """The sharding of a layout over the replicas, and of `inner` over inner axes."""
    if layout is STACKED:
        inner = of_stacked(of_versions(inner))
    if not any(inner):
        return replicas.sharding(layout)
    base = replicas.spec(layout)
    longest = range(max(len(base), len(inner)))
    both = [[_mesh.axes_of(s[i]) for s in (base, inner) if i < len(s)] for i in longest]
    return NamedSharding(replicas.mesh, _mesh.spec_of(sum(e, ()) for e in both))


def of_versions(inner: InnerSpec) -> InnerSpec:
    """The spec of versions `[...]`, from that of an array `[replica, ...]`."""
    return PartitionSpec(*inner[1:])


def of_stacked(inner: InnerSpec) -> InnerSpec:
    """The spec of an array `[replica, ...]`, from that of its versions `[...]`."""
    return PartitionSpec(None, *inner) if any(inner) else WHOLE


def is_spec(value: object) -> TypeGuard[InnerSpec]:
    return isinstance(value, PartitionSpec)


def assembled(array: jax.Array) -> np.ndarray:
    """The whole array, where this process has all shards."""
    host = np.zeros(array.shape, array.dtype)
    for shard in array.addressable_shards:
        host[shard.index] = shard.data
    return host


def has_inner_axes(replicas: Replicas) -> bool:
    """Whether replicas have logical axes; the replica of no strategy has none."""
    return bool(replicas.axes and replicas.inner_axes)


def checked_spec(
    spec: object, shape: Sequence[int], replicas: Replicas, what: str
) -> InnerSpec:
    """A user's spec over inner axes, checked for an array of this shape."""
    if not is_spec(spec):
        raise TypeError(
            f"{what} is {shown(spec)}; a `jax.sharding.PartitionSpec` of logical axes "
            "was wanted, or None."
        )
    entries = [_names(entry, spec, what) for entry in spec]
    named = [name for names in entries for name in names]
    for name in named:
        _check_axis(name, named, replicas, f"{what} is {spec}")
    if len(entries) > len(shape):
        raise ValueError(
            f"{what} is {spec}, which has {len(entries)} entries for an array of shape "
            f"{tuple(shape)}. Give one for each of its {len(shape)} dimensions at most."
        )
    for dimension, (names, size) in enumerate(zip(entries, shape, strict=False)):
        parts = math.prod(replicas.inner_sizes[name] for name in names)
        if size % parts:
            raise ValueError(
                f"{what} is {spec}, but dimension {dimension} of its shape "
                f"{tuple(shape)} is {size}, no multiple of {parts}, the size of "
                f"{' and '.join(map(repr, names))}. Divide another dimension, "
                "or none (`None`)."
            )
    return spec


def _names(entry: object, spec: InnerSpec, what: str) -> tuple[str, ...]:
    """The axes of an entry of a user's spec."""
    axes = _mesh.axes_of(entry)
    if not all(isinstance(name, str) for name in axes):
        raise TypeError(
            f"{what} is {spec}, which has an entry {shown(entry)}; None, the name of "
            "an axis or a tuple of names was wanted."
        )
    return axes


def _check_axis(name: str, named: Sequence[str], replicas: Replicas, what: str) -> None:
    if name in replicas.inner_axes and has_inner_axes(replicas):
        if named.count(name) > 1:
            raise ValueError(f"{what}, which names {name!r} twice; once was wanted.")
        return
    if name == _mesh.REPLICA_AXIS:
        raise ValueError(
            f"{what}, which names {name!r}, the axis along which replicas differ. "
            "State is equal on all of them: name axes inside a replica only. To let "
            "each replica keep a part of it, make the strategy with "
            "`sharding=js.StateSharding()`."
        )
    raise ValueError(f"{what}, {which_axes(name, replicas)}")


def which_axes(name: str, replicas: Replicas) -> str:
    """The part of a message that a replica has no such axis, and what to do."""
    if replicas.per_device > 1:
        return (
            f"which names an axis {name!r}, but replicas share devices. Leave it out: "
            "Flax's annotations (`nn.with_partitioning`) mean nothing there by "
            "themselves."
        )
    if not has_inner_axes(replicas):
        return (
            f"which names an axis {name!r}, but replicas have one device each. Make "
            f"the strategy with `logical_axes={{{name!r}: n}}`, of size 1 too."
        )
    axes = " and ".join(map(repr, replicas.inner_axes))
    return (
        f"which names an axis {name!r}, but a replica has {axes}. Name one of these, "
        "in Flax also by a rule for the logical name, or None."
    )


def over_axis(array: jax.Array, axis: str) -> jax.Array:
    """`array`, its first dimension sharded over an inner axis, the others unchanged."""
    others = [PartitionSpec.UNCONSTRAINED] * (array.ndim - 1)
    # No `NamedSharding` of the strategy's mesh: beside a manual axis `jnp.zeros_like`
    # and others refuse an array that it constrains (JAX 0.10 and 0.12).
    return lax.with_sharding_constraint(array, PartitionSpec(axis, *others))


Tiles = Sequence[tuple[str, ...]]
"""For each dimension of an array the inner axes over which it is sharded."""


def logical_axes(count: int) -> dict[str, int]:
    """The inner axes of replicas of `count` devices: one for each prime factor.

    So each division into equal tiles is one along axes. The first axis is the one along
    which the numbers of devices differ most.
    """
    factors = list(_prime_factors(count))
    if len(factors) == 1:
        return {"core": factors[0]}
    return {f"core_{number}": factor for number, factor in enumerate(factors)}


def tiles(splits: Sequence[int], replicas: Replicas) -> Tiles:
    """The axes that divide an array's dimensions into so many parts.

    If the number of devices is a power of one prime, such as 2, the tiles lie on them
    in row-major order.
    """
    left = replicas.inner_sizes
    found: list[tuple[str, ...]] = []
    for parts in splits:
        names: list[str] = []
        for factor in _prime_factors(parts):
            name = next(name for name, size in left.items() if size == factor)
            del left[name]
            names.append(name)
        found.append(tuple(names))
    return found


def sharding_of(
    divided: Tiles, layout: ReplicaLayout, replicas: Replicas
) -> NamedSharding:
    """The sharding of an array of this layout in tiles on each replica's devices."""
    first = [replicas.axes] if layout is STACKED else []
    return NamedSharding(replicas.mesh, PartitionSpec(*first, *divided))


def _prime_factors(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
            yield factor
