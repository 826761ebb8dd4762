"""`DeviceAssignment`: which devices each replica has."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np

from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.text import several_whole, shown, whole, with_noun
from jaxstrategy._src.tpu.topology import (
    AXES,
    Integers,
    Nested,
    TPUTopology,
    by_task,
    integers,
)

Chip = tuple[int, ...]
"""The coordinates `(x, y, z)` of a chip."""


def ring(shape: Sequence[int]) -> list[Chip]:
    """All chips of a mesh of this shape, as a ring."""
    long = [axis for axis in range(3) if shape[axis] > 1]
    if len(long) < 2 or any(shape[axis] % 2 for axis in long):
        return [chip[::-1] for chip in itertools.product(*map(range, shape[::-1]))]
    if len(long) == 3:
        # Layer by layer around, up along z, and back down the edge that was left out.
        x, y, z = shape
        turns = [list(_around(x, y))[:: -1 if layer % 2 else 1] for layer in range(z)]
        up = [(a, b, layer) for layer, turn in enumerate(turns) for a, b in turn]
        return [(0, 0, 0), *up, *((0, 0, layer) for layer in range(z - 1, 0, -1))]
    first, second = long
    chips = np.zeros((math.prod(shape), 3), int)
    chips[:, long] = [(0, 0), *_around(shape[first], shape[second])]
    return [tuple(chip) for chip in chips.tolist()]


def _around(width: int, height: int) -> Iterator[tuple[int, int]]:
    """A path around a plane, from one side of its corner `(0, 0)` to the other."""
    for b in range(height):
        row = range(1, width) if b % 2 == 0 else range(width - 1, 0, -1)
        yield from ((a, b) for a in row)
    yield from ((0, b) for b in range(height - 1, 0, -1))


class DeviceOrderMode(enum.IntEnum):
    """The order in which replicas, and the cores of each, follow each other.

    AUTO is RING where that is possible and MESH elsewhere. In a RING each chip is
    beside the next one, for sums around rings; MESH counts along the axes.

    >>> import jaxstrategy as js
    >>> [mode.name for mode in js.tpu.experimental.DeviceOrderMode]
    ['AUTO', 'RING', 'MESH']
    """

    AUTO = 0
    RING = 1
    MESH = 2


_RANK = len(AXES)
# The cores of a chip are nearest to each other; then come the neighbours along x.
_NEAREST_FIRST = (3, 0, 1, 2)


def _blocks(
    topology: TPUTopology,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    count: int,
    mode: DeviceOrderMode,
) -> Integers:
    """The coordinates of each core of equal blocks: `[block, core, 4]`."""
    mesh, size = topology.mesh_shape.tolist(), math.prod(shape)
    described = (
        f"{count} of the shape {list(shape)} with the stride {list(stride)} in a mesh "
        f"of the shape {mesh}"
    )
    # What a block and the gaps in it cover. The gaps hold others.
    extent = [a * b for a, b in zip(shape, stride, strict=True)]
    if any(map(int.__gt__, extent, mesh)):
        in_line = ""
        if math.prod(mesh) == mesh[0] >= size:  # chips of one core, as GPUs are
            in_line = (
                f" These devices are in a line: give [{size}, 1, 1, 1] for replicas of "
                f"{with_noun(size, 'device')}, and no stride."
            )
        raise ValueError(
            f"computation footprint {extent} does not fit in TPU topology shape "
            f"{mesh}. It is `computation_shape` times `computation_stride`.{in_line}"
        )
    along = zip(mesh, extent, stride, strict=True)
    room = [length // block * gap for length, block, gap in along]
    if count > math.prod(room):
        raise ValueError(
            f"requested {count} replicas but only {math.prod(room)} replicas fit: "
            f"{described}."
        )
    if topology.num_missing:
        if mode is DeviceOrderMode.RING or math.prod(stride) > 1:
            raise ValueError(
                f"{topology!r} lacks {with_noun(topology.num_missing, 'device')}. Then "
                "there is no RING, and no stride: leave `device_order_mode` and "
                "`computation_stride` out."
            )
        # Blocks of the devices that are there, one after the other, task by task.
        found = topology.device_coordinates.reshape(-1, _RANK)
        if count * size > len(found):
            raise ValueError(
                f"requested {count} replicas but only {len(found) // size} replicas "
                f"fit, each of {with_noun(size, 'device')} of the {len(found)} that "
                f"are there in {topology!r}."
            )
        return found[: count * size].reshape(count, size, _RANK)
    is_dense = shape[3] == mesh[3] and math.prod(stride) == 1
    has_ring = is_dense and count == math.prod(room)
    if mode is DeviceOrderMode.RING and not has_ring:
        raise ValueError(
            "`device_order_mode` was RING, but a ring needs blocks without a stride, "
            f"with all cores of their chips, on all of the mesh. This is {described}. "
            "Use AUTO."
        )
    # The number of blocks along each axis, as equal as they can be.
    counts, left = [1] * _RANK, count
    for done, axis in enumerate(sorted(_NEAREST_FIRST, key=lambda axis: room[axis])):
        counts[axis] = min(_root(left, _RANK - done), room[axis])
        left = -(-left // counts[axis])
    if has_ring and mode is not DeviceOrderMode.MESH:
        chips = np.asarray(ring(shape[:3]))
        blocks = np.asarray(ring(counts[:3])) * shape[:3]
        cores = np.zeros((count, len(chips), shape[3], _RANK), np.int32)
        cores[..., :3] = blocks[:, None, None] + chips[:, None]
        cores[..., 3] = np.arange(shape[3])
        return cores.reshape(count, size, _RANK)
    places, rest = np.zeros((count, _RANK), np.int64), np.arange(count)
    for axis in _NEAREST_FIRST:
        rest, places[:, axis] = np.divmod(rest, counts[axis])
    outer, inner = np.divmod(places, stride)
    inside = np.asarray(list(itertools.product(*map(range, shape))))
    starts = outer * np.asarray(extent) + inner
    return (starts[:, None] + inside * np.asarray(stride)).astype(np.int32)


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
    """The smallest integer whose power of this degree is `number` or more."""
    return next(root for root in itertools.count(1) if root**degree >= number)


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
        count = whole(num_replicas)
        topology = _checked_topology(topology)
        if count is None or count < 1:
            raise ValueError(
                f"`num_replicas` was {shown(num_replicas)}; a positive whole number "
                "was wanted."
            )
        shape = _sizes(computation_shape, "computation_shape")
        stride = _sizes(computation_stride, "computation_stride")
        mode = DeviceOrderMode(device_order_mode)
        return cls(topology, _blocks(topology, shape, stride, count, mode))

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
        """The replicas that this core of the task belongs to, in order.

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
            "`js.tpu.experimental.initialize_tpu_system()` returns; "
            "`js.profiling.Topology` is another class, of links."
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


def checked_cores(assignment: object, cores_per_replica: object) -> int:
    """The number of devices of each replica."""
    if not isinstance(assignment, DeviceAssignment | None):
        raise TypeError(
            f"`experimental_device_assignment` was {shown(assignment)}; a "
            "`js.tpu.experimental.DeviceAssignment` was wanted, or None."
        )
    cores = whole(cores_per_replica)
    if cores is None:
        raise TypeError(
            f"`cores_per_replica` was {shown(cores_per_replica)}; a whole number was "
            "wanted."
        )
    if cores < 1:
        raise ValueError(f"`cores_per_replica` was {cores}; at least 1 was wanted.")
    if assignment is None:
        return cores
    if cores not in (1, assignment.num_cores_per_replica):
        raise ValueError(
            f"`cores_per_replica` was {cores}, and the device assignment has "
            f"{assignment.num_cores_per_replica}. Leave `cores_per_replica` out."
        )
    return assignment.num_cores_per_replica


def devices_of_replicas(
    devices: Sequence[Device], assignment: DeviceAssignment | None, cores: int
) -> list[Device]:
    tasks = by_task(devices)
    if assignment is None:
        found = [device for task in tasks for device in task]
        if len(found) % cores:
            raise ValueError(
                f"`cores_per_replica` was {cores}, and {len(found)} devices are no "
                f"multiple of that: {_devices.names(found)}. Give another number, or a "
                "`DeviceAssignment` of some of them."
            )
    else:
        found = _assigned(assignment, tasks)
    _check_processes(found, cores, len(tasks))
    return found


def _assigned(
    assignment: DeviceAssignment, tasks: Sequence[Sequence[Device]]
) -> list[Device]:
    topology = assignment.topology
    fewest = min(len(task) for task in tasks)
    if topology.num_tasks != len(tasks) or topology.num_tpus_per_task > fewest:
        raise ValueError(
            f"The device assignment is for {topology!r}; here are {len(tasks)} "
            f"processes (tasks) with {fewest} devices each. "
            "`js.tpu.experimental.initialize_tpu_system()` returns the topology that "
            "is here."
        )
    found: list[Device] = []
    for core in assignment.core_assignment.reshape(-1, topology.mesh_rank).tolist():
        task = topology.task_ordinal_at_coordinates(core)
        found.append(tasks[task][topology.tpu_device_ordinal_at_coordinates(core)])
    if twice := sorted({_devices.name(d) for d in found if found.count(d) > 1}):
        raise ValueError(
            f"The device assignment has {', '.join(twice)} more than once; a device is "
            "one replica's. `MirroredStrategy(replicas_per_device=...)` lets several "
            "share one."
        )
    return found


def _check_processes(devices: Sequence[Device], cores: int, processes: int) -> None:
    owners = [device.process_index for device in devices]
    for first in range(0, len(owners), cores):
        own = sorted(set(owners[first : first + cores]))
        if len(own) > 1:
            raise ValueError(
                f"Replica {first // cores} would have devices of the processes "
                f"{', '.join(map(str, own))}. The devices of a replica are those of "
                "one process: give fewer cores for each."
            )
    if len(set(owners)) < processes:
        raise ValueError(
            f"The device assignment has devices of {len(set(owners))} processes, and "
            f"{processes} take part. To use those of one alone, give "
            '`TPUClusterResolver("local")`.'
        )
