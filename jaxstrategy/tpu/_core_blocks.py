"""Blocks of cores in a mesh, one for each replica: `CoreBlocks`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import final

import numpy as np

from jaxstrategy.text._shown import shown
from jaxstrategy.text._units import with_noun
from jaxstrategy.text._whole_numbers import several_whole, whole
from jaxstrategy.tpu._chip_ring import ring
from jaxstrategy.tpu._device_order import DeviceOrderMode
from jaxstrategy.tpu._tpu_topology import AXES, Integers, TPUTopology

_RANK = len(AXES)
# The cores of a chip are nearest to each other; then come the neighbours along x.
_NEAREST_FIRST = (3, 0, 1, 2)


@final
@dataclasses.dataclass(frozen=True)
class CoreBlocks:
    """Equal blocks of the cores of a topology, one for each of some replicas.

    Attributes:
      topology: the devices.
      shape: how many cores a block has along each axis.
      stride: from one core of a block to its next, along each axis.
      count: the number of blocks.
    """

    topology: TPUTopology
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    count: int

    @staticmethod
    def chosen(
        topology: TPUTopology, shape: object, stride: object, count: object
    ) -> CoreBlocks:
        """The blocks that a user asks for.

        Raises:
          ValueError: there cannot be such, or not so many.
        """
        number = whole(count)
        if number is None or number < 1:
            raise ValueError(
                f"`num_replicas` was {shown(count)}; a positive whole number was "
                "wanted."
            )
        blocks = CoreBlocks(
            topology,
            _sizes(shape, "computation_shape"),
            _sizes(stride, "computation_stride"),
            number,
        )
        blocks._check_fits()
        return blocks

    def cores(self, mode: DeviceOrderMode) -> Integers:
        """The coordinates of each core of each block: `[block, core, 4]`.

        Raises:
          ValueError: there is no ring, or too many devices are missing.
        """
        if self.topology.num_missing:
            return self._of_those_left(mode)
        if mode is DeviceOrderMode.RING and not self._has_ring:
            raise ValueError(
                "`device_order_mode` was RING, but a ring needs blocks without a "
                "stride, with all cores of their chips, on all of the mesh. This is "
                f"{self._described()}. Use AUTO."
            )
        if mode is DeviceOrderMode.MESH or not self._has_ring:
            return self._in_mesh()
        return self._in_ring()

    @property
    def _mesh(self) -> tuple[int, ...]:
        return tuple(self.topology.mesh_shape.tolist())

    @property
    def _extent(self) -> tuple[int, ...]:
        """The size of what a block and the gaps in it cover."""
        return tuple(a * b for a, b in zip(self.shape, self.stride, strict=True))

    @property
    def _room(self) -> tuple[int, ...]:
        """The number of blocks that fit along each axis: the gaps hold others."""
        sizes = zip(self._mesh, self._extent, self.stride, strict=True)
        return tuple(size // extent * stride for size, extent, stride in sizes)

    @property
    def _has_ring(self) -> bool:
        has_whole_chips = self.shape[3] == self._mesh[3]
        is_dense = math.prod(self.stride) == 1
        return has_whole_chips and is_dense and self.count == math.prod(self._room)

    def _in_ring(self) -> Integers:
        """Block after block around a ring, and so the chips in each block."""
        x, y, z, cores = self.shape
        across, along, up, _ = self._counts()
        return np.asarray(
            [
                [
                    [*np.multiply(block, (x, y, z)) + chip, core]
                    for chip in ring((x, y, z))
                    for core in range(cores)
                ]
                for block in ring((across, along, up))
            ],
            np.int32,
        )

    def _in_mesh(self) -> Integers:
        """Block after block along the axes, and so the cores in each block."""
        counts = self._counts()
        places = np.zeros((self.count, _RANK), np.int64)
        left = np.arange(self.count)
        for axis in _NEAREST_FIRST:
            left, places[:, axis] = np.divmod(left, counts[axis])
        outer, inner = np.divmod(places, self.stride)
        starts = outer * self._extent + inner
        inside = np.asarray(list(itertools.product(*map(range, self.shape))))
        cores = starts[:, None] + inside * np.asarray(self.stride)
        return cores.astype(np.int32)

    def _counts(self) -> tuple[int, ...]:
        """The number of blocks along each axis, as equal as they can be.

        The axis with the least room is asked first, of equal ones the nearest.
        """
        counts = [1] * _RANK
        blocks = self.count
        order = sorted(_NEAREST_FIRST, key=lambda axis: self._room[axis])
        for done, axis in enumerate(order):
            counts[axis] = min(_root(blocks, _RANK - done), self._room[axis])
            blocks = -(-blocks // counts[axis])
        return tuple(counts)

    def _of_those_left(self, mode: DeviceOrderMode) -> Integers:
        """Blocks of the devices that are there, one after the other, task by task."""
        if mode is DeviceOrderMode.RING or math.prod(self.stride) > 1:
            raise ValueError(
                f"{self.topology!r} lacks "
                f"{with_noun(self.topology.num_missing, 'device')}. Then "
                "there is no RING, and no stride: leave `device_order_mode` and "
                "`computation_stride` out."
            )
        size = math.prod(self.shape)
        found = self.topology.device_coordinates.reshape(-1, _RANK)
        if self.count * size > len(found):
            raise ValueError(
                f"requested {self.count} replicas but only {len(found) // size} "
                f"replicas fit, each of {with_noun(size, 'device')} of the "
                f"{len(found)} that are there in {self.topology!r}."
            )
        return found[: self.count * size].reshape(self.count, size, _RANK)

    def _check_fits(self) -> None:
        if any(map(int.__gt__, self._extent, self._mesh)):
            raise ValueError(
                f"computation footprint {list(self._extent)} does not fit in TPU "
                f"topology shape {list(self._mesh)}. It is `computation_shape` times "
                f"`computation_stride`.{self._shape_in_line()}"
            )
        most = math.prod(self._room)
        if self.count > most:
            raise ValueError(
                f"requested {self.count} replicas but only {most} replicas fit: "
                f"{self._described()}."
            )

    def _shape_in_line(self) -> str:
        """What to give where chips have one core and stand in a line, as GPUs do."""
        size = math.prod(self.shape)
        if math.prod(self._mesh) > self._mesh[0] or size > self._mesh[0]:
            return ""
        return (
            f" These devices are in a line: give [{size}, 1, 1, 1] for replicas of "
            f"{with_noun(size, 'device')}, and no stride."
        )

    def _described(self) -> str:
        return (
            f"{self.count} of the shape {list(self.shape)} with the stride "
            f"{list(self.stride)} in a mesh of the shape {list(self._mesh)}"
        )


def _sizes(given: object, name: str) -> tuple[int, ...]:
    """One positive number for each axis; by default 1."""
    found = (1,) * _RANK if given is None else several_whole(given)
    if found is None or len(found) != _RANK:
        raise ValueError(
            f"{name} must have shape [{_RANK}], a whole number for each of "
            f"{', '.join(AXES)}; got {shown(given)}."
        )
    if min(found) < 1:
        raise ValueError(f"{name} must be positive; got {name}={shown(given)}.")
    return found


def _root(number: int, degree: int) -> int:
    """The smallest number of which the power of this degree is `number` or more."""
    return next(root for root in itertools.count(1) if root**degree >= number)
