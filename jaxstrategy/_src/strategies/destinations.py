"""The devices to which values are reduced or copied: `CopyPlace`."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias, final

import jax
from jax.core import Tracer
from jax.sharding import Sharding

from jaxstrategy._src.replicas import devices as _devices, mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.inner_placement import lying_like, replicas_with
from jaxstrategy._src.replicas.replicas import SAME, Replicas
from jaxstrategy._src.strategies.process_role import ProcessRole
from jaxstrategy._src.values import building, per_replica, trees
from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import Leaf, PyTree
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.variable import Variable

Destinations: TypeAlias = Any
"""A device or its name, several, a variable, a `PerReplica` or an array."""


@final
@dataclasses.dataclass(frozen=True)
class CopyPlace:
    """A place for copies of values.

    Attributes:
      sharding: of an array there; None where arrays stay, on all replicas, because a
        step is traced.
      replicas: those that have a copy each.
    """

    sharding: Sharding | None
    replicas: Replicas

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each copy, the first if it has several."""
        return tuple(dict.fromkeys(self.replicas.devices))

    def placed(self, result: PyTree) -> PyTree:
        """A reduced value here; where it is if it is traced."""
        sharding = self.sharding
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(result))
        if sharding is None or traced:
            return result
        return jax.tree.map(
            lambda leaf: mesh.place(leaf, _there(leaf, sharding)), result
        )

    def copies(self, value: PyTree, in_step: bool) -> PyTree:
        """Copies of a value here; where it is if it is traced.

        Variables count as their values. Leaves that are neither arrays nor numbers stay
        as they are.

        Args:
          value: a pytree of what is the same for all replicas.
          in_step: whether it is part of a step that is traced.

        Raises:
          ValueError: a leaf is a `PerReplica`, outside of a step.
        """
        sharding = self.sharding

        def copied(leaf: Leaf) -> Leaf:
            leaf = leaf.value() if isinstance(leaf, Handle) else leaf
            if in_step:
                return leaf
            check_reduced(leaf, "copy_to")
            if sharding is None or isinstance(leaf, Tracer):
                return leaf
            if not building.is_value(leaf) or _lies(leaf, sharding):
                return leaf
            return building.replicate_leaf(leaf, _there(leaf, sharding))

        return trees.map_around_objects(copied, value)

    def with_arrays(self, tree: PyTree) -> PyTree:
        """`tree` with its arrays here, if they lie on other devices.

        JAX does not compute with arrays of different devices.
        """
        sharding, devices = self.sharding, self.replicas.all_devices

        def moved(leaf: Leaf) -> Leaf:
            if sharding is None or not isinstance(leaf, jax.Array):
                return leaf
            if isinstance(leaf, Tracer) or leaf.sharding.device_set == devices:
                return leaf
            return mesh.broadcast(leaf, _there(leaf, sharding))

        return trees.map_around_objects(moved, tree)


def check_reduced(tree: PyTree, method: str) -> None:
    """Raise if a leaf is a `PerReplica`, given to a method of `strategy.extended`.

    Raises:
      ValueError: there is one.
    """
    if any(
        isinstance(leaf, PerReplica)
        for leaf in jax.tree.leaves(tree, is_leaf=trees.is_whole)
    ):
        raise ValueError(
            f"`extended.{method}` was given a PerReplica: each copy would be, or would "
            "be changed to, another value. Reduce it first: "
            "`strategy.extended.reduce_to(op, value, destinations)`."
        )


def check_task(destinations: Destinations, role: ProcessRole) -> None:
    """Raise if a destination is a device of another task of the cluster.

    Raises:
      ValueError: it is.
    """
    is_one = isinstance(destinations, str)
    names = [destinations] if is_one else destinations
    for name in names if isinstance(names, (list, tuple)) else ():
        task = _devices.task_of(name) if isinstance(name, str) else None
        if task is not None and role.is_another(task):
            job, number = role.task()
            raise ValueError(
                f"Cannot reduce to another worker, or copy there: {name!r} is a device "
                f"of task {task[1]} of job {task[0]!r}, and this process is task "
                f"{number} of job {job!r}. Name a device of this process or a variable."
            )


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


def copies_on(destinations: Destinations, replicas: Replicas) -> CopyPlace:
    """The place that `destinations` name.

    Args:
      destinations: what a user says.
      replicas: those of the strategy.

    Raises:
      ValueError: there is no destination, or no such device.
      TypeError: `destinations` names no devices.
    """
    if isinstance(destinations, (str, Device)):
        device = _devices.find(destinations)
        return CopyPlace(
            jax.sharding.SingleDeviceSharding(device), Replicas.on([device])
        )
    if isinstance(destinations, (list, tuple)):
        return _on_each(_replicas_on(destinations, replicas))
    if isinstance(destinations, ShardedVariable):  # all shards are read in one place
        destinations = destinations.variables[0]
    if isinstance(destinations, Variable):
        if access.tracing() is not None:
            return CopyPlace(None, destinations.replicas)
        return _on_each(destinations.replicas)
    whole = not isinstance(destinations, PerReplica)
    value = destinations if whole else per_replica.contents(destinations)
    if isinstance(value, Tracer):
        return CopyPlace(None, replicas)
    if isinstance(value, jax.Array):
        is_copied = whole and value.is_fully_replicated
        sharding = value.sharding
        return _lying_as(sharding if is_copied else mesh.replicated_like(sharding))
    raise TypeError(
        f"`destinations` was {destinations!r}; a device, a device name, a list of "
        "them, a variable, a PerReplica or an array was wanted."
    )


def _on_each(replicas: Replicas) -> CopyPlace:
    return CopyPlace(replicas.sharding(SAME), replicas)


def _lying_as(sharding: Sharding) -> CopyPlace:
    replicas = replicas_with(sharding)
    if replicas is None:
        devices = sorted(sharding.device_set, key=lambda device: device.id)
        replicas = Replicas.on(devices)
    return CopyPlace(sharding, replicas)


def _replicas_on(devices: Destinations, replicas: Replicas) -> Replicas:
    """The strategy's own, if all of its devices are listed; else one on each device."""
    if not devices:
        raise ValueError(
            "The list of devices is empty. Name a device, several, or give a value "
            "whose devices are meant."
        )
    # Those of other processes are there, too, and twice the shared ones.
    if tuple(devices) == replicas.devices or set(devices) == replicas.all_devices:
        return replicas
    return Replicas.on(_devices.choose(devices))


def _lies(leaf: Leaf, sharding: Sharding) -> bool:
    """Whether `leaf` is the array of one device, and there already."""
    return isinstance(leaf, jax.Array) and leaf.sharding == sharding


def _there(leaf: Leaf, sharding: Sharding) -> Sharding:
    """The place of a value: on replicas it stays divided over the devices of each."""
    replicas = replicas_with(sharding)
    return sharding if replicas is None else lying_like(leaf, replicas)
