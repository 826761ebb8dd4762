"""The devices of replicas: how many replicas there are, and where."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
from jax.sharding import Mesh

from jaxstrategy._src.replicas import devices as _devices, mesh as _mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.text.units import with_noun


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
