"""One array and where it lies: `PlacedArray`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import jax
from jax.sharding import Sharding

from jaxstrategy.replicas import _devices
from jaxstrategy.replicas._devices import Device
from jaxstrategy.replicas._state_sharding import ArrayLike
from jaxstrategy.text._array_types import array_type
from jaxstrategy.text._html_colours import Colour
from jaxstrategy.text._units import with_noun

Interval: TypeAlias = tuple[int, int]
"""The first index along a dimension, and that after the last."""


@dataclasses.dataclass(frozen=True)
class PlacedArray:
    """One array of a tree, and where its parts lie.

    Attributes:
      path: in the tree.
      type: dtype and shape; of a `PerReplica` those of one version.
      shape: of all that lies on the devices.
      itemsize: bytes of an element.
      parts: the devices that hold each part, by its intervals along the dimensions.
      has_versions: whether the first dimension is that of the replicas.
      elsewhere: where it lies, in words, if that is no device of this job.
    """

    path: str
    type: str
    shape: tuple[int, ...] = ()
    itemsize: int = 0
    parts: Mapping[tuple[Interval, ...], tuple[Device, ...]] = dataclasses.field(
        default_factory=dict
    )
    has_versions: bool = False
    elsewhere: str = ""

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices that hold something of it, by number."""
        found = {device for devices in self.parts.values() for device in devices}
        return tuple(sorted(found, key=lambda device: device.id))

    @property
    def divided(self) -> dict[int, list[Interval]]:
        """The intervals along each dimension that has several, in order."""
        along = enumerate(zip(*self.parts, strict=True)) if self.shape else ()
        found = {i: sorted(set(intervals)) for i, intervals in along}
        return {i: each for i, each in found.items() if len(each) > 1}

    @property
    def colour(self) -> Colour:
        """What its colour says."""
        if not self.parts:
            return Colour.IDLE if self.elsewhere else Colour.WHOLE
        if self.has_versions:
            return Colour.OWN
        return Colour.PART if self.divided else Colour.WHOLE

    @property
    def device_bytes(self) -> dict[Device, int]:
        """The bytes that each device has of it."""
        return {
            device: self.itemsize * math.prod(end - begin for begin, end in part)
            for part, devices in self.parts.items()
            for device in devices
        }

    def __str__(self) -> str:
        if not self.parts:
            return self.elsewhere
        devices = self.devices
        where = _devices.names(devices)
        divided = ", ".join(self._divisions())
        if self.has_versions:
            versions = f"versions of {with_noun(self.shape[0], 'replica')}"
            divided = ", each with ".join(filter(None, (versions, divided)))
        if not divided:
            return f"whole on each of {where}" if len(devices) > 1 else f"on {where}"
        held_by = len(next(iter(self.parts.values())))
        each = f", each on {held_by} of them" if held_by > 1 else ""
        return f"{divided} on {where}{each}"

    def _divisions(self) -> Iterator[str]:
        first = int(self.has_versions)
        for dimension, intervals in self.divided.items():
            if dimension >= first:
                parts = with_noun(len(intervals), "part")
                yield f"dimension {dimension - first} in {parts}"


def placed_array(
    path: str, leaf: ArrayLike, sharding: Sharding, has_versions: bool = False
) -> PlacedArray:
    """An array of this type as its sharding says."""
    shape = tuple(leaf.shape)
    parts: dict[tuple[Interval, ...], tuple[Device, ...]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found = zip(index or (), shape, strict=True)
        part = tuple(each.indices(length)[:2] for each, length in found)
        parts[part] = (*parts.get(part, ()), device)
    itemsize = leaf.dtype.itemsize
    return PlacedArray(
        path,
        array_type(leaf.dtype, shape[int(has_versions) :]),
        shape,
        itemsize,
        parts,
        has_versions,
    )


def is_placed_type(leaf: object) -> bool:
    """Whether it is the type of an array, with a sharding."""
    return isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None
