"""Groups of devices, by their places in a mesh."""

from __future__ import annotations

import itertools
from typing import TypeAlias

import numpy as np
from jax.sharding import Mesh

DeviceGroups: TypeAlias = tuple[tuple[int, ...], ...]


def all_in_one(mesh: Mesh) -> DeviceGroups:
    """One group of all devices."""
    return (tuple(range(mesh.devices.size)),)


def differing_axes(mesh: Mesh, groups: DeviceGroups) -> tuple[str, ...]:
    """The axes of the mesh along which members of a group differ."""
    differ = [False] * mesh.devices.ndim
    for members in groups:
        for axis, places in enumerate(np.unravel_index(members, mesh.devices.shape)):
            differ[axis] |= bool((places != places[0]).any())
    return tuple(itertools.compress(mesh.axis_names, differ))
