"""Which devices each replica has, and where its arrays lie: `ReplicaPlacements`."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxstrategy._src.replicas import devices as _devices, mesh as _mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.text.shown import with_noun


@dataclasses.dataclass(frozen=True)
class ReplicaDevices:
    """The devices of some replicas.

    Attributes:
      mesh: the devices.
      axes: the names of the mesh axes along which replicas differ; along the others the
        devices of one replica do.
      per_device: how many replicas share a device.
    """

    mesh: Mesh
    axes: tuple[str, ...] = (_mesh.REPLICA_AXIS,)
    per_device: int = 1

    @functools.cached_property
    def inner_axes(self) -> tuple[str, ...]:
        """The names of the mesh axes along which the devices of one replica differ."""
        return tuple(name for name in self.mesh.axis_names if name not in self.axes)

    @property
    def inner_sizes(self) -> dict[str, int]:
        """The sizes of those, by name."""
        return {name: self.mesh.shape[name] for name in self.inner_axes}

    @functools.cached_property
    def count(self) -> int:
        """The number of replicas, those of other processes included."""
        return self.per_device * math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def description(self) -> str:
        """Their number, and how they go with devices if not one to one, in words."""
        number = with_noun(self.count, "replica")
        if inner := self.inner_sizes:
            return f"{number} of {inner}"
        sharing = self.per_device
        return f"{number}, {sharing} on each device" if sharing > 1 else number

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """The first device of each replica, in replica order."""
        return tuple(self.devices_of(i)[0] for i in range(self.count))

    @functools.cached_property
    def all_devices(self) -> frozenset[Device]:
        """The devices of all replicas."""
        return frozenset(self.mesh.devices.flat)

    @functools.cached_property
    def device_names(self) -> str:
        """The names of the devices of all replicas on one line."""
        return _devices.names([device for group in self.groups for device in group])

    def device_names_of(self, replica_id: int) -> str:
        """The names of the devices of one replica on one line."""
        return _devices.names(self.devices_of(replica_id))

    def devices_of(self, replica_id: int) -> tuple[Device, ...]:
        """The devices of one replica, in the order of the inner axes."""
        return self.groups[replica_id // self.per_device]

    @functools.cached_property
    def groups(self) -> tuple[tuple[Device, ...], ...]:
        """The devices of the replicas that share them, in replica order."""
        names = self.mesh.axis_names
        order = [names.index(axis) for axis in (*self.axes, *self.inner_axes)]
        groups = self.count // self.per_device
        found = self.mesh.devices.transpose(order).reshape(groups, -1)
        return tuple(tuple(row) for row in found)

    def replica_on(self, device: Device) -> int | None:
        """The first replica that `device` belongs to; None: it is another's."""
        return next(
            (i for i in range(self.count) if device in self.devices_of(i)), None
        )

    def here_of(self, replica_id: int) -> tuple[Device, ...]:
        """The devices of one replica that are in this process."""
        here = jax.process_index()
        devices = self.devices_of(replica_id)
        return tuple(device for device in devices if device.process_index == here)

    @functools.cached_property
    def own(self) -> tuple[int, ...]:
        """The replicas that have a device in this process, in order."""
        return tuple(i for i in range(self.count) if self.here_of(i))

    @functools.cached_property
    def own_devices(self) -> tuple[Device, ...]:
        """The first device here of each replica of this process, in replica order."""
        return tuple(self.here_of(i)[0] for i in self.own)


class Meaning(enum.Enum):
    """The meaning of an array on the devices of all replicas."""

    SAME = "same"
    """Every replica holds the whole array."""

    SPLIT = "split"
    """Replica i holds entry i of the first dimension."""


SAME, SPLIT = Meaning.SAME, Meaning.SPLIT

Lies: TypeAlias = Meaning | int
"""Its meaning; or the dimension along which it is divided, the same for all."""


def sharded_along(dimension: int | None) -> Lies:
    """What is the same for all and divided along a dimension; None: whole."""
    return SAME if dimension is None else dimension


@dataclasses.dataclass(frozen=True)
class ReplicaPlacements(ReplicaDevices):
    """How arrays lie on the devices of some replicas."""

    @functools.cached_property
    def are_all_own(self) -> bool:
        """Whether this process has the devices of all replicas."""
        return self.sharding(SAME).is_fully_addressable

    # Arrays on all replicas.

    def spec(self, meaning: Meaning) -> PartitionSpec:
        """The division of an array of this meaning over the mesh."""
        is_divided = meaning is SPLIT and self.axes
        return PartitionSpec(self.axes) if is_divided else PartitionSpec()

    def sharding(self, meaning: Meaning) -> NamedSharding:
        """The placement of an array of this meaning."""
        return self._shardings[meaning]

    @functools.cached_property
    def _shardings(self) -> dict[Meaning, NamedSharding]:
        return {
            meaning: NamedSharding(self.mesh, self.spec(meaning)) for meaning in Meaning
        }

    def differ(self, meaning: Meaning) -> bool:
        """Whether replicas may have different arrays of this meaning."""
        return meaning is SPLIT and bool(self.axes)

    def divides_over_replicas(self, sharding: Sharding) -> bool:
        """Whether a sharding names the axes along which replicas differ."""
        return isinstance(sharding, NamedSharding) and any(
            not set(self.axes).isdisjoint(_mesh.names(entry)) for entry in sharding.spec
        )

    def may_lie_inside(self, shape: Sequence[int]) -> bool:
        """Whether the devices of a replica may have parts of an array of this shape."""
        sizes = [size for size in self.inner_sizes.values() if size > 1]
        return any(length % size == 0 for length in shape for size in sizes)

    def inner_placement(
        self, array: jax.Array, meaning: Meaning
    ) -> NamedSharding | None:
        """The placement of `array`, `[...]`, if inner axes at most divide it besides.

        None if it lies elsewhere, or if replicas have other entries of it.
        """
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return None
        entries = list(map(_mesh.names, sharding.spec))
        over_replicas = [not set(self.axes).isdisjoint(names) for names in entries]
        if meaning is SPLIT and (self.count > 1 or any(over_replicas)):
            if not over_replicas or entries[0] != self.axes:
                return None
            over_replicas[0] = False
        return None if any(over_replicas) else sharding

    def spec_of(self, lies: Lies) -> PartitionSpec:
        """The division of an array over the replicas' axes of the mesh."""
        return self.spec_along(lies) if isinstance(lies, int) else self.spec(lies)

    # Arrays of which each replica keeps a part.

    @functools.cached_property
    def parts(self) -> int:
        """The number of parts of an array that is divided over the replicas."""
        return self.count // self.per_device

    def spec_along(self, dimension: int | None) -> PartitionSpec:
        """The division of an array along one of its dimensions; None: it is whole."""
        if dimension is None:
            return PartitionSpec()
        return PartitionSpec(*(None,) * dimension, self.axes)

    def sharding_along(self, dimension: int | None) -> NamedSharding:
        """The placement of an array that is divided along one of its dimensions."""
        found = self._sharding_along.get(dimension)
        if found is None:
            found = NamedSharding(self.mesh, self.spec_along(dimension))
            self._sharding_along[dimension] = found
        return found

    @functools.cached_property
    def _sharding_along(self) -> dict[int | None, NamedSharding]:
        # One object for each, so that looking whether an array lies there is quick.
        return {None: self.sharding(SAME)}

    def constraint_along(self, dimension: int, rank: int) -> NamedSharding:
        """As `sharding_along`, for an array that XLA may divide over inner axes."""
        if not self.inner_axes:
            return self.sharding_along(dimension)
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * rank
        entries[dimension] = self.axes
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def on_mesh(self, sharding: NamedSharding) -> NamedSharding:
        """The same division, of an array on the devices of these replicas."""
        return _mesh.on_mesh(sharding, self.mesh)

    def dimension_of(self, array: jax.Array) -> int | None:
        """The dimension along which `array`, `[...]`, is divided over these replicas.

        None if it is not.
        """
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return None
        return self.dimension_along(sharding)

    def dimension_along(self, sharding: NamedSharding) -> int | None:
        """The dimension that a sharding divides over all replicas; None: none."""
        for dimension, names in enumerate(sharding.spec):
            named = names if isinstance(names, tuple) else (names,)
            if not set(self.axes).isdisjoint(named):
                return dimension if named == self.axes else None
        return None
