"""Values of a replica on its logical devices: whole on each, or in tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.abstract_strategy import AbstractStrategy
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.logical_devices import Tiles, sharding_of, tiles
from jaxstrategy._src.replicas.replicas import SAME, SPLIT, Replicas
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.text.whole_numbers import several_whole, whole
from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.arrays import as_array
from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import Value

_Array: TypeAlias = jax.Array | np.ndarray


def split(
    strategy: AbstractStrategy, tensor: Value | PerReplica | Handle, splits: object
) -> jax.Array | PerReplica:
    """A value in tiles on the logical devices of each replica.

    Raises:
      ValueError: the numbers of parts do not fit the shape or the devices.
      TypeError: they are no whole numbers; the value is no array.
      ContextError: in another strategy's scope.
    """
    value = _checked(tensor)
    parts = _checked_splits(splits)
    _check_fit(parts, tuple(value.shape), logical_devices(strategy._replicas))
    return _laid(strategy, value, tiles(parts, strategy._replicas))


def replicate(
    strategy: AbstractStrategy, tensor: Value | PerReplica | Handle
) -> jax.Array | PerReplica:
    """A value whole on each logical device of each replica.

    Raises:
      TypeError: the value is no array.
      ContextError: in another strategy's scope.
    """
    value = _checked(tensor)
    return _laid(strategy, value, [()] * len(value.shape))


def logical_devices(replicas: Replicas) -> int:
    """The number of logical devices of a replica."""
    return math.prod(replicas.inner_sizes.values())


def check_logical_device(given: object, replicas: Replicas) -> None:
    """Raise unless a replica has a logical device of this number.

    Raises:
      ValueError: it has none.
    """
    number, count = whole(given), logical_devices(replicas)
    if number is None or not 0 <= number < count:
        raise ValueError(
            f"`logical_device_id` not in range: it was {shown(given)}, and a replica "
            f"has {count}, with the numbers 0 to {count - 1}. "
            "`TPUStrategy(cores_per_replica=...)` chooses how many."
        )


def _checked(tensor: Value | PerReplica | Handle) -> _Array | PerReplica:
    if isinstance(tensor, PerReplica):
        return tensor
    return as_array(tensor.value() if isinstance(tensor, Handle) else tensor, "tensor")


def _checked_splits(given: object) -> tuple[int, ...]:
    found = several_whole(given)
    if found is None:
        raise TypeError(
            f"`partition_dimensions` was {shown(given)}; a list of whole numbers was "
            "wanted, the number of parts of each dimension."
        )
    if min(found, default=1) < 1:
        raise ValueError(
            f"`partition_dimensions` was {list(found)}; a dimension has 1 part or more."
        )
    return found


def _check_fit(splits: Sequence[int], shape: tuple[int, ...], devices: int) -> None:
    if len(splits) != len(shape):
        raise ValueError(
            "Length of `partition_dimensions` must equal the number of dimensions of "
            f"`tensor`: it was {list(splits)}, and the shape is {shape}."
        )
    for dimension, (size, parts) in enumerate(zip(shape, splits, strict=True)):
        if size % parts:
            raise ValueError(
                f"Dimension {dimension} of `tensor` must be divisible by the number of "
                f"its parts: the shape is {shape}, and `partition_dimensions` "
                f"{list(splits)}."
            )
    if math.prod(splits) != devices:
        raise ValueError(
            "The product of `partition_dimensions` must be the number of logical "
            f"devices of a replica, {devices}: it was {list(splits)}, with the product "
            f"{math.prod(splits)}."
        )


def _laid(
    strategy: AbstractStrategy, value: _Array | PerReplica, divided: Tiles
) -> jax.Array | PerReplica:
    context = _context.current()
    _context.require_same(context, strategy)
    replicas = strategy._replicas
    if not isinstance(value, PerReplica):
        wanted = sharding_of(divided, SAME, replicas)
        return _constrained(value, wanted, replicas, context.in_step)
    # In a merge call it holds one replica's array.
    meaning = SAME if context.in_step else SPLIT
    wanted = sharding_of(divided, meaning, replicas)
    array = as_array(per_replica.contents(value), "tensor")
    found = _constrained(array, wanted, replicas, context.in_step)
    return per_replica.with_contents(value, found)


def _constrained(
    array: _Array, wanted: NamedSharding, replicas: Replicas, in_step: bool
) -> jax.Array:
    if in_step and not replicas.inner_axes:
        return jnp.asarray(array)  # on the only device
    if in_step:
        # By names only: the mesh that a step sees is that of one replica.
        return lax.with_sharding_constraint(array, wanted.spec)
    if isinstance(array, Tracer):
        return lax.with_sharding_constraint(array, wanted)
    return mesh.broadcast(array, wanted)
