"""Where the replicas of a strategy are: `Replicas`."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any, final

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxstrategy.replicas import _mesh
from jaxstrategy.replicas._devices import Device


class Meaning(enum.Enum):
    """What an array on the devices of all replicas means."""

    SAME = "same"
    """Every replica holds the whole array."""

    SPLIT = "split"
    """Replica i holds entry i of the first dimension."""


SAME, SPLIT = Meaning.SAME, Meaning.SPLIT


@final
@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a strategy: their number, their devices, their collectives' axes.

    Everything that is asked about replicas is asked here, so that nothing else depends
    on how many devices a replica has, or how many replicas a device.

    Attributes:
      mesh: the devices.
      axes: the names of the mesh axes along which replicas differ; none for the single
        replica of code that runs under no strategy, which has no collectives.
      inner_axes: the names of the axes along which the devices of one replica differ.
      per_device: how many replicas a device has.
    """

    mesh: Mesh
    axes: tuple[str, ...] = (_mesh.REPLICA_AXIS,)
    inner_axes: tuple[str, ...] = ()
    per_device: int = 1

    @staticmethod
    def on(devices: Sequence[Device]) -> Replicas:
        """One replica on each of `devices`, in the order given.

        Raises:
          TypeError: they are not devices.
          ValueError: there is none, or one twice.
        """
        return Replicas(_mesh.mesh_of(devices))

    @functools.cached_property
    def count(self) -> int:
        """How many replicas there are, those of other processes included."""
        groups = 1
        for axis in self.axes:
            groups *= self.mesh.shape[axis]
        return groups * self.per_device

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """The first device of each replica, in replica order."""
        return tuple(self.devices_of(i)[0] for i in range(self.count))

    def devices_of(self, replica_id: int) -> tuple[Device, ...]:
        """The devices of one replica."""
        return self._rows[replica_id // self.per_device]

    @functools.cached_property
    def _rows(self) -> tuple[tuple[Device, ...], ...]:
        """The devices of the replicas that share them, in replica order."""
        names = self.mesh.axis_names
        inner = [name for name in names if name not in self.axes]
        order = [names.index(axis) for axis in (*self.axes, *inner)]
        found = self.mesh.devices.transpose(order)
        return tuple(
            tuple(row) for row in found.reshape(self.count // self.per_device, -1)
        )

    @functools.cached_property
    def own(self) -> tuple[int, ...]:
        """The replicas of this process."""
        here = jax.process_index()
        return tuple(
            i for i, device in enumerate(self.devices) if device.process_index == here
        )

    def index(self) -> jax.Array | int:
        """Which replica this is, while a step is traced; 0 where there are no axes."""
        return lax.axis_index(self.axes) if self.axes else 0

    def spec(self, meaning: Meaning) -> PartitionSpec:
        """How an array of this meaning is divided over the mesh."""
        return PartitionSpec(self.axes) if meaning is SPLIT else PartitionSpec()

    def sharding(self, meaning: Meaning) -> NamedSharding:
        """Where an array of this meaning lies."""
        return NamedSharding(self.mesh, self.spec(meaning))

    def versions(self, array: Any) -> tuple[jax.Array, ...]:
        """What each replica of this process has of `array`, in replica order.

        Args:
          array: one of shape `[replica, ...]`, divided over the replicas.

        Returns:
          Arrays of shape `[...]`, each on its replica's device.
        """
        at = {shard.device: shard.data for shard in array.addressable_shards}
        return tuple(at[self.devices[i]][i % self.per_device] for i in self.own)
