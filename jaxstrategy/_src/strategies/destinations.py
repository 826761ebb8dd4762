"""Destinations of `reduce_to` and `copy_to`, and logical devices of a replica."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.replicas import devices as _devices, mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.inner_axes import (
    Tiles,
    replicas_with,
    sharding_like,
    sharding_of,
    tiles,
)
from jaxstrategy._src.replicas.replicas import REPLICATED, STACKED, Replicas
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.text import several_whole, shown, whole
from jaxstrategy._src.values import building, per_replica, trees
from jaxstrategy._src.values.arrays import Leaf, PyTree, Value, as_array
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.variable import Variable

Destinations: TypeAlias = Any
"""A device or its name, several, a variable, a `PerReplica` or an array."""


@final
@dataclasses.dataclass(frozen=True)
class CopyPlace:
    """A place for copies of values."""

    # None while a step is traced: arrays stay on all replicas.
    sharding: Sharding | None
    replicas: Replicas  # those that have a copy each

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each copy, the first if it has several."""
        return tuple(dict.fromkeys(self.replicas.devices))

    def sharding_for(self, leaf: Leaf) -> Sharding | None:
        """Where a copy of `leaf` lies; None for what is traced."""
        if self.sharding is None or isinstance(leaf, Tracer):
            return None
        # On replicas as it is sharded over the devices of each.
        replicas = replicas_with(self.sharding)
        return self.sharding if replicas is None else sharding_like(leaf, replicas)

    def placed(self, result: PyTree) -> PyTree:
        """A reduced value placed here, unless it is traced."""

        def place(leaf: Leaf) -> Leaf:
            where = self.sharding_for(leaf)
            return leaf if where is None else mesh.place(leaf, where)

        return jax.tree.map(place, result)

    def copies(self, value: PyTree, in_step: bool) -> PyTree:
        """Copies of arrays, numbers and variables in `value`, unless it is traced."""

        def copied(leaf: Leaf) -> Leaf:
            leaf = leaf.value() if isinstance(leaf, Handle) else leaf
            if in_step:
                return leaf
            check_reduced(leaf, "copy_to")
            if (
                not building.is_value(leaf)
                or (where := self.sharding_for(leaf)) is None
            ):
                return leaf
            is_there = isinstance(leaf, jax.Array) and leaf.sharding == self.sharding
            return leaf if is_there else building.replicate_leaf(leaf, where)

        return trees.map_around_objects(copied, value)

    def with_arrays(self, tree: PyTree) -> PyTree:
        """`tree` with arrays on other devices moved here, to compute with them."""
        devices = self.replicas.all_devices

        def moved(leaf: Leaf) -> Leaf:
            where = self.sharding_for(leaf) if isinstance(leaf, jax.Array) else None
            if where is None or leaf.sharding.device_set == devices:
                return leaf
            return mesh.broadcast(leaf, where)

        return trees.map_around_objects(moved, tree)


def check_reduced(tree: PyTree, method: str) -> None:
    """Raise if a leaf is a `PerReplica`, given to a method of `strategy.extended`."""
    if any(
        isinstance(leaf, PerReplica)
        for leaf in jax.tree.leaves(tree, is_leaf=trees.is_whole)
    ):
        raise ValueError(
            f"`extended.{method}` was given a PerReplica: each copy would be, or would "
            "be changed to, another value. Reduce it first: "
            "`strategy.extended.reduce_to(op, value, destinations)`."
        )


def check_task(destinations: Destinations, choices: Choices) -> None:
    """Raise if a destination is a device of another task of the cluster."""
    is_one = isinstance(destinations, str)
    names = [destinations] if is_one else destinations
    for name in names if isinstance(names, (list, tuple)) else ():
        task = _devices.task_of(name) if isinstance(name, str) else None
        if task is not None and choices.is_another(task):
            job, number = choices.task()
            raise ValueError(
                f"Cannot reduce to another worker, or copy there: {name!r} is a device "
                f"of task {task[1]} of job {task[0]!r}, and this process is task "
                f"{number} of job {job!r}. Name a device of this process or a variable."
            )


def checked_pairs(pairs: object) -> list[tuple[PyTree, Destinations]]:
    if isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        return [tuple(pair) for pair in pairs]
    raise ValueError(
        "Each element of `value_destination_pairs` should be a tuple of a value and "
        f"its destinations, got {pairs!r}."
    )


def copies_on(destinations: Destinations, replicas: Replicas) -> CopyPlace:
    """The place that `destinations` name."""
    if isinstance(destinations, (str, Device)):
        device = _devices.find(destinations)
        return CopyPlace(
            jax.sharding.SingleDeviceSharding(device), Replicas.on([device])
        )
    if isinstance(destinations, (list, tuple)):
        if not destinations:
            raise ValueError(
                "The list of devices is empty. Name a device, several, or give a value "
                "whose devices are meant."
            )
        # The strategy's replicas if all their devices are listed: `replicas.devices`
        # has those of other processes, and shared ones several times.
        given, all_devices = tuple(destinations), replicas.all_devices
        if given != replicas.devices and set(given) != all_devices:
            replicas = Replicas.on(_devices.choose(destinations))
        return CopyPlace(replicas.sharding(REPLICATED), replicas)
    if isinstance(destinations, ShardedVariable):  # all shards are read in one place
        destinations = destinations.variables[0]
    if isinstance(destinations, Variable):
        replicas, is_traced = destinations.replicas, access.tracing() is not None
        where = None if is_traced else replicas.sharding(REPLICATED)
        return CopyPlace(where, replicas)
    whole = not isinstance(destinations, PerReplica)
    value = destinations if whole else per_replica.contents(destinations)
    if isinstance(value, Tracer):
        return CopyPlace(None, replicas)
    if isinstance(value, jax.Array):
        sharding = value.sharding
        if not whole or not value.is_fully_replicated:
            sharding = mesh.replicated_like(sharding)
        holders = replicas_with(sharding)
        if holders is None:
            devices = sorted(sharding.device_set, key=lambda device: device.id)
            holders = Replicas.on(devices)
        return CopyPlace(sharding, holders)
    raise TypeError(
        f"`destinations` was {destinations!r}; a device, a device name, a list of "
        "them, a variable, a PerReplica or an array was wanted."
    )


_Array: TypeAlias = jax.Array | np.ndarray


def split(
    strategy: AbstractStrategy, tensor: Value | PerReplica | Handle, splits: object
) -> jax.Array | PerReplica:
    """A value in tiles on the logical devices of each replica."""
    value = _checked(tensor)
    parts = _checked_splits(splits, tuple(value.shape), strategy._replicas)
    return _place_tiles(strategy, value, tiles(parts, strategy._replicas))


def replicate(
    strategy: AbstractStrategy, tensor: Value | PerReplica | Handle
) -> jax.Array | PerReplica:
    """A value whole on each logical device of each replica."""
    value = _checked(tensor)
    return _place_tiles(strategy, value, [()] * len(value.shape))


def check_logical_device(value: object, replicas: Replicas) -> None:
    """Raise unless a replica has a logical device of this number."""
    number, count = whole(value), math.prod(replicas.inner_sizes.values())
    if number is None or not 0 <= number < count:
        raise ValueError(
            f"`logical_device_id` not in range: it was {shown(value)}, and a replica "
            f"has {count}, with the numbers 0 to {count - 1}. "
            "`TPUStrategy(cores_per_replica=...)` chooses how many."
        )


def _checked(tensor: Value | PerReplica | Handle) -> _Array | PerReplica:
    if isinstance(tensor, PerReplica):
        return tensor
    return as_array(tensor.value() if isinstance(tensor, Handle) else tensor, "tensor")


def _checked_splits(
    value: object, shape: tuple[int, ...], replicas: Replicas
) -> tuple[int, ...]:
    splits = several_whole(value)
    if splits is None:
        raise TypeError(
            f"`partition_dimensions` was {shown(value)}; a list of whole numbers was "
            "wanted, the number of parts of each dimension."
        )
    if min(splits, default=1) < 1:
        raise ValueError(
            f"`partition_dimensions` was {list(splits)}; a dimension has 1 part or "
            "more."
        )
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
    devices = math.prod(replicas.inner_sizes.values())
    if math.prod(splits) != devices:
        raise ValueError(
            "The product of `partition_dimensions` must be the number of logical "
            f"devices of a replica, {devices}: it was {list(splits)}, with the product "
            f"{math.prod(splits)}."
        )
    return splits


def _place_tiles(
    strategy: AbstractStrategy, value: _Array | PerReplica, divided: Tiles
) -> jax.Array | PerReplica:
    context = _context.current()
    _context.require_same(context, strategy)
    replicas = strategy._replicas
    if not isinstance(value, PerReplica):
        sharding = sharding_of(divided, REPLICATED, replicas)
        return _constrained(value, sharding, replicas, context.in_step)
    # In a merge call it holds one replica's array.
    layout = REPLICATED if context.in_step else STACKED
    sharding = sharding_of(divided, layout, replicas)
    array = as_array(per_replica.contents(value), "tensor")
    placed = _constrained(array, sharding, replicas, context.in_step)
    return per_replica.with_contents(value, placed)


def _constrained(
    array: _Array, sharding: NamedSharding, replicas: Replicas, in_step: bool
) -> jax.Array:
    if in_step and not replicas.inner_axes:
        return jnp.asarray(array)  # on the only device
    if in_step:
        # By names only: the mesh that a step sees is that of one replica.
        return lax.with_sharding_constraint(array, sharding.spec)
    if isinstance(array, Tracer):
        return lax.with_sharding_constraint(array, sharding)
    return mesh.broadcast(array, sharding)
