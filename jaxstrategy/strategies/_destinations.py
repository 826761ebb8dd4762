"""The destinations of `extended.reduce_to`, on which it places results."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
from jax.core import Tracer

from jaxstrategy.replicas import _devices, _mesh
from jaxstrategy.replicas._devices import Device
from jaxstrategy.replicas._inner_placement import lying_like, replicas_with
from jaxstrategy.replicas._replicas import SAME, Replicas
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import PyTree
from jaxstrategy.variables import _access
from jaxstrategy.variables._variable import Variable

Destinations: TypeAlias = Any
"""A device or its name, several, a variable, a `PerReplica` or an array."""


def checked_pairs(pairs: object) -> list[tuple[PyTree, Destinations]]:
    """`pairs` as a list of tuples.

    Raises:
      ValueError: they are something else than a sequence of pairs.
    """
    if isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        return [tuple(pair) for pair in pairs]
    raise ValueError(
        "Each element of `value_destination_pairs` should be a tuple of a value and "
        f"its destinations, got {pairs!r}."
    )


def sharding_of(destinations: Destinations) -> jax.sharding.Sharding | None:
    """The sharding of a result; None where it stays, on all replicas.

    Raises:
      ValueError: there is no destination, or no such device.
      TypeError: `destinations` names no devices.
    """
    if isinstance(destinations, (str, Device)):
        return jax.sharding.SingleDeviceSharding(_devices.find(destinations))
    if isinstance(destinations, (list, tuple)):
        if not destinations:
            raise ValueError(
                "`destinations` is empty. Name a device, several, or give a value "
                "whose devices are meant."
            )
        return Replicas.on(_devices.choose(destinations)).sharding(SAME)
    if isinstance(destinations, Variable):
        if _access.tracing() is not None:
            return None
        return destinations.replicas.sharding(SAME)
    whole = not isinstance(destinations, PerReplica)
    value = destinations if whole else _per_replica.contents(destinations)
    if isinstance(value, Tracer):
        return None
    if isinstance(value, jax.Array):
        is_copied = whole and value.is_fully_replicated
        return value.sharding if is_copied else _mesh.replicated_like(value.sharding)
    raise TypeError(
        f"`destinations` was {destinations!r}; a device, a device name, a list of "
        "them, a variable, a PerReplica or an array was wanted."
    )


def placed(result: PyTree, sharding: jax.sharding.Sharding | None) -> PyTree:
    """`result` where it goes; where it is if it is traced, or if that is None."""
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(result))
    if sharding is None or traced:
        return result
    return jax.tree.map(lambda leaf: _mesh.place(leaf, _there(leaf, sharding)), result)


def _there(leaf: jax.Array, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The place of a result: on replicas it stays divided over the devices of each."""
    replicas = replicas_with(sharding)
    return sharding if replicas is None else lying_like(leaf, replicas)
