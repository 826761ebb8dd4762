"""The axes along which replicas that share devices differ: `LaneAxes`."""

from __future__ import annotations

import dataclasses
from typing import final

import jax
from jax import lax

from jaxstrategy.replicas._replicas import Replicas


@final
@dataclasses.dataclass(frozen=True)
class LaneAxes:
    """The axes of replicas that share devices; replica = device * lanes + lane.

    Attributes:
      replicas: the name that steps know, of all replicas.
      parts: the name that divided steps know, of the devices.
      devices: the name of the mesh's axis.
      lanes: the name of the axis of `jax.vmap`.
      num_devices: the size of the mesh's axis.
      num_lanes: the number of replicas on a device.
    """

    replicas: str
    parts: str
    devices: str
    lanes: str
    num_devices: int
    num_lanes: int

    @staticmethod
    def of(replicas: Replicas) -> LaneAxes:
        """Those of some replicas."""
        (axis,), (parts,) = replicas.axes, replicas.part_axes
        (lanes,) = replicas.sharing_axes
        return LaneAxes(axis, parts, axis, lanes, replicas.parts, replicas.per_device)

    @property
    def of_steps(self) -> list[tuple[str, int]]:
        """The axes that steps know, and their sizes; the last two if divided only."""
        return [
            (self.replicas, self.count),
            (self.parts, self.num_devices),
            (self.lanes, self.num_lanes),
        ]

    @property
    def of_lanes(self) -> list[tuple[str, int]]:
        """The axes that lanes know, and their sizes."""
        return [(self.devices, self.num_devices), (self.lanes, self.num_lanes)]

    @property
    def both(self) -> tuple[str, str]:
        """The axes along which replicas differ."""
        return self.devices, self.lanes

    @property
    def count(self) -> int:
        """The number of replicas."""
        return self.num_devices * self.num_lanes

    def index(self) -> jax.Array:
        """The number of this replica."""
        return lax.axis_index(self.devices) * self.num_lanes + self.lane()

    def lane(self) -> jax.Array:
        """The number of this lane on its device."""
        return lax.axis_index(self.lanes)

    def own(self, *arrays: jax.Array) -> list[jax.Array]:
        """`arrays`, which to `jax.vmap` each lane then has for itself."""
        is_any = self.lane() >= 0
        return [lax.select(is_any, x, x) for x in arrays]

    def versions(self, array: jax.Array) -> jax.Array:
        """All replicas' arrays: `[...]` -> `[replica, ...]`."""
        own = lax.all_gather(array, self.lanes)
        everything = lax.all_gather(own, self.devices)
        return everything.reshape(self.count, *array.shape)
