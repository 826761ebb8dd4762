"""The devices of each replica, by their coordinates: `DeviceAssignment`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final

import numpy as np

from jaxstrategy.text._shown import shown
from jaxstrategy.text._units import with_noun
from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.tpu._core_blocks import CoreBlocks
from jaxstrategy.tpu._device_order import DeviceOrderMode
from jaxstrategy.tpu._tpu_topology import (
    Integers,
    Nested,
    TPUTopology,
    integers,
)


@final
class DeviceAssignment:
    """The devices of each replica, in a topology: `TPUStrategy` takes one.

    `build` chooses compact blocks of neighbours; the constructor takes what you choose.

    Args:
      topology: of all devices.
      core_assignment: `[replica, logical core, 4]`, the coordinates
        `(x, y, z, core)` of each device of each replica.

    Raises:
      ValueError: `topology` is none, `core_assignment` has another shape, or there is
        no device at some of the coordinates.

    >>> import jaxstrategy as js
    >>> cores = [[x, y, 0, c] for y in (0, 1) for x in (0, 1) for c in (0, 1)]
    >>> topology = js.tpu.experimental.Topology(
    ...     mesh_shape=[2, 2, 1, 2], device_coordinates=[cores]
    ... )
    >>> assignment = js.tpu.experimental.DeviceAssignment.build(
    ...     topology, computation_shape=[1, 1, 1, 2], num_replicas=4
    ... )
    >>> assignment
    DeviceAssignment(4 replicas of 2 cores)
    >>> assignment.coordinates(replica=2, logical_core=1)
    (1, 1, 0, 1)
    >>> assignment.tpu_device(replica=2, logical_core=1)
    '/task:0/device:TPU:7'
    """

    def __init__(self, topology: TPUTopology, core_assignment: Nested) -> None:
        self._topology = _checked_topology(topology)
        self._cores = _checked_cores(core_assignment, topology)
        self._tasks = [
            [topology.task_ordinal_at_coordinates(core) for core in replica]
            for replica in self._cores.tolist()
        ]

    @classmethod
    def build(
        cls,
        topology: TPUTopology,
        computation_shape: Sequence[int] | Integers | None = None,
        computation_stride: Sequence[int] | Integers | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """An assignment of compact blocks of equal shape, one for each replica.

        Args:
          topology: of all devices.
          computation_shape: the cores of a replica along x, y, z, and of each chip; one
            by default.
          computation_stride: the distance between them, 1 by default; the cores of
            other replicas lie between.
          num_replicas: the number of replicas.
          device_order_mode: the order of replicas and of their cores.

        Raises:
          ValueError: `topology` is none, the shapes are not of four positive numbers,
            so many replicas do not fit, or there is no ring of them.

        >>> import jaxstrategy as js
        >>> cores = [[x, 0, 0, 0] for x in range(8)]
        >>> topology = js.tpu.experimental.Topology(
        ...     mesh_shape=[8, 1, 1, 1], device_coordinates=[cores]
        ... )
        >>> js.tpu.experimental.DeviceAssignment.build(
        ...     topology, computation_shape=[2, 1, 1, 1], num_replicas=4
        ... ).core_assignment[:, :, 0]
        array([[0, 1],
               [2, 3],
               [4, 5],
               [6, 7]], dtype=int32)
        """
        blocks = CoreBlocks.chosen(
            _checked_topology(topology),
            computation_shape,
            computation_stride,
            num_replicas,
        )
        return cls(topology, blocks.cores(DeviceOrderMode(device_order_mode)))

    @property
    def topology(self) -> TPUTopology:
        """The topology of all devices."""
        return self._topology

    @property
    def num_cores_per_replica(self) -> int:
        """The number of devices of each replica."""
        return self._cores.shape[1]

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return self._cores.shape[0]

    @property
    def core_assignment(self) -> Integers:
        """The coordinates of each device: `[replica, logical core, 4]`."""
        return self._cores

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """The coordinates `(x, y, z, core)` of a device of a replica.

        Raises:
          ValueError: there is no such replica, or it has no such core.
        """
        self._check_number("replica", replica, self.num_replicas)
        self._check_number("logical_core", logical_core, self.num_cores_per_replica)
        return tuple(self._cores[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """The replicas of which this core is a device of this task, in order.

        Args:
          task_id: the number of the task, which is a process.
          logical_core: the number of the core in its replica.

        Raises:
          ValueError: there is none.
        """
        found = self._replicas.get((task_id, logical_core))
        if found is None:
            raise ValueError(
                f"Can not find any replica in task: {task_id} contains logical_core: "
                f"{logical_core}. There are {self!r} in {self._topology!r}."
            )
        return list(found)

    @functools.cached_property
    def _replicas(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for replica, tasks in enumerate(self._tasks):
            for core, task in enumerate(tasks):
                found.setdefault((task, core), []).append(replica)
        return found

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """The ordinal of a device of a replica among those of its task.

        Raises:
          ValueError: there is no such replica, or it has no such core.
        """
        where = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(where)

    def host_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """The name of the CPU beside a device of a replica.

        Raises:
          ValueError: there is no such replica, or it has no such core.
        """
        where = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(where, job)

    def tpu_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """The name of a device of a replica.

        Raises:
          ValueError: there is no such replica, or it has no such core.
        """
        where = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(where, job)

    def _check_number(self, name: str, given: object, count: int) -> None:
        number = whole(given)
        if number is None or not 0 <= number < count:
            raise ValueError(
                f"`{name}` was {shown(given)}; a number from 0 to {count - 1} was "
                f"wanted. There are {self!r}."
            )

    def __repr__(self) -> str:
        replicas, cores, _ = self._cores.shape
        return (
            f"DeviceAssignment({with_noun(replicas, 'replica')} of "
            f"{with_noun(cores, 'core')})"
        )


def _checked_topology(given: object) -> TPUTopology:
    if not isinstance(given, TPUTopology):
        raise ValueError(
            f"topology must be a Topology object, got {shown(given)}. Use what "
            "`js.tpu.experimental.initialize_tpu_system()` returns; `js.Topology`, "
            "without `tpu.experimental`, is another class, of links."
        )
    return given


def _checked_cores(given: Nested, topology: TPUTopology) -> Integers:
    found = integers(given)
    if found is None or found.ndim != 3 or not found.size:
        raise ValueError(
            "core_assignment must be a rank 3 numpy array of whole numbers, "
            f"[replica, core, {topology.mesh_rank}]; got {shown(given)}."
        )
    if found.shape[-1] != topology.mesh_rank:
        raise ValueError(
            "core_assignment.shape[-1] must have size equal to topology rank "
            f"({topology.mesh_rank}), got core_assignment.shape={found.shape}."
        )
    return found.astype(np.int32)
