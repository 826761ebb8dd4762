"""The versions of this process's replicas, where they can be computed with each other.

JAX does not compute with arrays of different devices, and each replica's version lies
on its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxstrategy._src.masks import filled_rows
from jaxstrategy._src.replicas.inner_placement import (
    inner_spec,
    of_versions,
    with_inner,
)
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.strategies.many_leaves import in_parts
from jaxstrategy._src.tracing.stages import stages
from jaxstrategy._src.values import arrays as _arrays, per_replica
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import Function

# A larger version stays on its device: each is copied to all devices of the process.
_SMALL_BYTES = 65536


def local_versions(
    values: Sequence[PerReplica], replicas: Replicas
) -> list[tuple[jax.Array, ...]]:
    """Of each value the versions of this process's replicas, only their real rows.

    Args:
      values: they, outside a step.
      replicas: those of the strategy.
    """
    own = _own(replicas)
    small = [i for i, value in enumerate(values) if _is_brought(value, own)]
    brought = in_parts(
        functools.partial(_everywhere, own=own), [values[i] for i in small]
    )
    everywhere = dict(zip(small, brought, strict=True))
    if any(isinstance(value.mask, Tracer) for value in values):
        filled_rows.warn_of_traced("experimental_local_results")
        return [value.values for value in values]
    return [
        filled_rows.real_versions(
            value, everywhere[i] if i in everywhere else value.values
        )
        for i, value in enumerate(values)
    ]


@functools.lru_cache(maxsize=64)
def _own(replicas: Replicas) -> Replicas:
    """The replicas of this process, by themselves."""
    if replicas.are_all_own:
        return replicas
    first, last = replicas.own[0], replicas.own[-1]
    devices = [
        device for i in range(first, last + 1) for device in replicas.devices_of(i)
    ]
    return Replicas.on(
        list(dict.fromkeys(devices)),
        logical_axes=replicas.inner_sizes,
        per_device=replicas.per_device,
    )


def _is_brought(value: PerReplica, own: Replicas) -> bool:
    """Whether the versions are small, and each lies on a device of `own`."""
    array = per_replica.contents(value)
    _arrays.check_alive(array, "A PerReplica")
    if own.count == 1 or not _arrays.is_placed(array) or not array.shape:
        return False
    bytes_each = int(np.prod(array.shape[1:])) * array.dtype.itemsize
    devices = array.sharding.addressable_devices
    return (
        bytes_each <= _SMALL_BYTES
        and Replicas.dividing(array) is not None
        and devices == own.all_devices
    )


def _everywhere(
    values: Sequence[PerReplica], own: Replicas
) -> tuple[tuple[jax.Array, ...], ...]:
    """The versions of each value, whole on each replica of `own`."""
    if not values:
        return ()
    stacked = [_own_part(value.stacked, own) for value in values]
    specs = [of_versions(inner_spec(array, own)) for array in stacked]
    versions = _unstacked(tuple(with_inner(spec, own) for spec in specs))(stacked)
    if stages.needed(own.devices):
        stages.dispatched(versions[0][0])
    return versions


def _own_part(array: jax.Array, own: Replicas) -> jax.Array:
    """The part of a stacked array that this process has, as one of its own."""
    if array.is_fully_addressable:
        return array
    replicas = Replicas.dividing(array)
    assert replicas is not None, "`_is_brought` has asked"
    return own.stacked(replicas.versions(array))


@functools.lru_cache(maxsize=64)
def _unstacked(shardings: tuple[NamedSharding, ...]) -> Function:
    def unstack(arrays: list[jax.Array]) -> tuple[tuple[jax.Array, ...], ...]:
        return tuple(tuple(array[i] for i in range(len(array))) for array in arrays)

    return jax.jit(unstack, out_shardings=shardings)
