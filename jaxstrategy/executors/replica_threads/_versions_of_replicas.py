"""Values of all replicas and what each has of them: apart, and together again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.lax import convert_element_type_p
from jax.sharding import NamedSharding

from jaxstrategy.replicas import _mesh
from jaxstrategy.replicas._inner_placement import lying_like
from jaxstrategy.replicas._random_keys import is_key
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values import _building, _per_replica
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Leaf


def apart(value: Leaf, replicas: Replicas) -> list[Leaf]:
    """What each replica of this process has of a value of all.

    Shapes: of a `PerReplica` of versions `[...]` these; of an array a copy for each.
    What is no array they all have.
    """
    if isinstance(value, PerReplica):
        return list(versions(_per_replica.contents(value), replicas))
    if isinstance(value, jax.Array):
        return list(copies(value, replicas))
    return [value] * len(replicas.own)


def versions(stacked: Leaf, replicas: Replicas) -> list[jax.Array]:
    """The entries of an array `[replica, ...]`, each on its replica's devices."""
    placed = _per_replica.contents(_building.place_stacked(stacked, replicas))
    return list(replicas.versions(placed))


def copies(array: jax.Array, replicas: Replicas) -> list[jax.Array]:
    """An array that all have, once on the devices of each."""
    whole = _mesh.place(array, lying_like(array, replicas))
    return [
        as_weak(each, getattr(array, "weak_type", False))
        for each in replicas.copies(whole)
    ]


def as_weak(array: jax.Array, is_weak: bool) -> jax.Array:
    """`array`, which gives way to other dtypes, as Python's numbers do, or does not."""
    if is_key(array.dtype) or array.weak_type == is_weak:
        return array
    convert: Any = convert_element_type_p
    return convert.bind(array, new_dtype=array.dtype, weak_type=is_weak, sharding=None)


def together(found: Sequence[Leaf], replicas: Replicas) -> PerReplica:
    """The versions of this process's replicas as a `PerReplica` of all."""
    arrays = [
        each if isinstance(each, jax.Array) else np.asarray(each) for each in found
    ]
    return PerReplica(replicas.stacked(arrays))


def mirrored(array: Leaf, replicas: Replicas) -> jax.Array:
    """An array that each replica of each process has, as one of all."""
    return _mesh.place(array, lying_like(array, replicas))


def mirrored_on(array: Leaf, sharding: NamedSharding) -> jax.Array:
    """The same elsewhere."""
    return _mesh.place(array, sharding)


def digest(array: Leaf) -> str:
    """Equal for arrays of the same type and bits."""
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    text = f"{host.dtype}{host.shape}".encode() + host.tobytes()
    return hashlib.sha256(text).hexdigest()
