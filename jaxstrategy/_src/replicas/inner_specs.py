"""Divisions of arrays over the devices of one replica, as users write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, TypeGuard

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.replicas import SAME, Replicas
from jaxstrategy._src.text.shown import shown

Spec: TypeAlias = PartitionSpec
"""The division of an array over inner axes."""


def is_spec(value: object) -> TypeGuard[Spec]:
    """Whether `value` says how an array is divided."""
    return isinstance(value, PartitionSpec)


def sharding_by(spec: Spec, replicas: Replicas) -> NamedSharding:
    """The placement of an array of which each replica has all, divided so."""
    is_whole = not any(spec)
    return replicas.sharding(SAME) if is_whole else NamedSharding(replicas.mesh, spec)


def whole_here(array: jax.Array) -> np.ndarray:
    """All of an array of which the devices of this process have all parts."""
    host = np.zeros(array.shape, array.dtype)
    for shard in array.addressable_shards:
        host[shard.index] = shard.data
    return host


def has_inner_axes(replicas: Replicas) -> bool:
    """Whether a replica has logical axes, along which arrays may be divided.

    The single replica of no strategy has none: its mesh is one device.
    """
    return bool(replicas.axes and replicas.inner_axes)


def checked_spec(
    spec: object, shape: Sequence[int], replicas: Replicas, what: str
) -> Spec:
    """The division of an array over inner axes, as a user wants it.

    Args:
      spec: what the user gave.
      shape: of the array.
      replicas: those of the strategy.
      what: how messages call the array and who wants it to be divided so.

    Raises:
      TypeError: it is no `PartitionSpec`, or has an entry that is no name.
      ValueError: it names an axis that a replica has not, or one twice; it is longer
        than the shape; a dimension does not divide by the axes that it names.
    """
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


def _names(entry: object, spec: Spec, what: str) -> tuple[str, ...]:
    """The axes that an entry of a spec names."""
    if entry is None:
        return ()
    given = entry if isinstance(entry, tuple) else (entry,)
    names = tuple(name for name in given if isinstance(name, str))
    if len(names) < len(given):
        raise TypeError(
            f"{what} is {spec}, which has an entry {shown(entry)}; None, the name of "
            "an axis or a tuple of names was wanted."
        )
    return names


def _check_axis(name: str, named: Sequence[str], replicas: Replicas, what: str) -> None:
    if name in replicas.inner_axes and has_inner_axes(replicas):
        if named.count(name) > 1:
            raise ValueError(f"{what}, which names {name!r} twice; once was wanted.")
        return
    if name == mesh.REPLICA_AXIS:
        raise ValueError(
            f"{what}, which names {name!r}, the axis along which replicas differ. "
            "State is equal on all of them: name axes inside a replica only. To let "
            "each replica keep a part of it, make the strategy with "
            "`sharding=js.StateSharding()`."
        )
    raise ValueError(f"{what}, {which_axes(name, replicas)}")


def which_axes(name: str, replicas: Replicas) -> str:
    """A part of messages: that a replica has no such axis, and what to do."""
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
