"""The TPU, or what JAX has instead of one, as a topology of devices."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np

from jaxstrategy._src import text
from jaxstrategy._src.cluster.resolvers.environment import default_resolver
from jaxstrategy._src.cluster.resolvers.tpu import TPUClusterResolver
from jaxstrategy._src.processes import job as _job
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.text import several_whole, shown, with_noun

AXES = ("x", "y", "z", "core")
"""The axes of a topology: the chip in three dimensions, and its core."""

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.integer[Any]]]
Nested: TypeAlias = np.ndarray[Any, np.dtype[Any]] | Sequence[Any]
"""Numbers in lists of lists, or an array."""


@final
class TPUTopology:
    """The devices of a job by their coordinates: `js.tpu.experimental.Topology`.

    A device has the coordinates `(x, y, z, core)` in the mesh of all devices, and is
    known by its task, which is the process it belongs to, and its ordinal among the
    devices of that. `initialize_tpu_system()` returns the topology of this job. It may
    also be given, to plan for devices that are not here.

    Args:
      serialized: what `serialized()` made, here or in TensorFlow. If it is given, the
        others do not matter.
      mesh_shape: four positive numbers, the size of the mesh along x, y and z, and the
        number of cores of each chip.
      device_coordinates: `[task, device, 4]`, the coordinates of each device.

    Raises:
      ValueError: the mesh is not one of four positive numbers; the coordinates have
        another shape, lie outside the mesh, or are those of two devices.

    >>> import jaxstrategy as js
    >>> cores = [[x, y, 0, c] for y in (0, 1) for x in (0, 1) for c in (0, 1)]
    >>> topology = js.tpu.experimental.Topology(
    ...     mesh_shape=[2, 2, 1, 2], device_coordinates=[cores]
    ... )
    >>> topology
    Topology(mesh_shape=[2, 2, 1, 2], 1 task of 8 devices)
    >>> topology.tpu_device_ordinal_at_coordinates([1, 0, 0, 1])
    3
    >>> topology.tpu_device_name_at_coordinates([1, 1, 0, 0], job="worker")
    '/job:worker/task:0/device:TPU:6'
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: Sequence[int] | Integers | None = None,
        device_coordinates: Nested | None = None,
    ) -> None:
        if serialized:
            mesh_shape, device_coordinates = _parsed(serialized)
        self._mesh_shape = np.asarray(_checked_mesh(mesh_shape), np.int32)
        self._coordinates = _checked_coordinates(device_coordinates, self._mesh_shape)
        self._serialized = serialized or None

    @property
    def mesh_shape(self) -> Integers:
        """The size of the mesh along x, y, z and the cores of a chip: `[4]`."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of axes of the mesh: 4."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> Integers:
        """The coordinates of each device of each task: `[task, device, 4]`."""
        return self._coordinates

    @property
    def num_tasks(self) -> int:
        """The number of tasks, which are processes."""
        return self._coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each task."""
        return self._coordinates.shape[1]

    @property
    def num_missing(self) -> int:
        """The number of coordinates in the mesh without a device."""
        tasks, devices, _ = self._coordinates.shape
        return math.prod(self._mesh_shape.tolist()) - tasks * devices

    @functools.cached_property
    def missing_devices(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The coordinates in the mesh without a device, of shape `[missing, 4]`."""
        is_missing = np.ones(self._mesh_shape, bool)
        is_missing[tuple(self._coordinates.reshape(-1, self.mesh_rank).T)] = False
        return np.argwhere(is_missing)

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """The task of the device there.

        Args:
          device_coordinates: `(x, y, z, core)`.

        Raises:
          ValueError: there is no device.
        """
        return self._at(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> int:
        """The ordinal, among the devices of its task, of the device there.

        Args:
          device_coordinates: `(x, y, z, core)`.

        Raises:
          ValueError: there is no device.
        """
        return self._at(device_coordinates)[1]

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """The name of the device there, as `/task:0/device:TPU:3`.

        Args:
          device_coordinates: `(x, y, z, core)`.
          job: that the name begins with, if it is to begin with one.

        Raises:
          ValueError: there is no device.
        """
        task, device = self._at(device_coordinates)
        return f"{_task_name(job, task)}/device:TPU:{device}"

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """The name of the CPU beside the device there, as `/task:0/device:CPU:0`.

        Args:
          device_coordinates: `(x, y, z, core)`.
          job: that the name begins with, if it is to begin with one.

        Raises:
          ValueError: there is no device.
        """
        task, _ = self._at(device_coordinates)
        return f"{_task_name(job, task)}/device:CPU:0"

    def serialized(self) -> bytes:
        """The topology as bytes, which TensorFlow reads too."""
        if self._serialized is None:
            tasks, devices, _ = self._coordinates.shape
            self._serialized = (
                _field(_MESH_SHAPE, self._mesh_shape.tolist())
                + _field(_TASKS, tasks)
                + _field(_DEVICES, devices)
                + _field(_COORDINATES, self._coordinates.ravel().tolist())
            )
        return self._serialized

    def _at(self, coordinates: Sequence[int]) -> tuple[int, int]:
        found = self._places.get(several_whole(coordinates) or ())
        if found is None:
            raise ValueError(
                f"There is no device at the coordinates {shown(coordinates)}; the "
                f"mesh of ({', '.join(AXES)}) has the shape "
                f"{self._mesh_shape.tolist()} and lacks "
                f"{with_noun(self.num_missing, 'device')}."
            )
        return found

    @functools.cached_property
    def _places(self) -> dict[tuple[int, ...], tuple[int, int]]:
        tasks, devices, _ = self._coordinates.shape
        return {
            tuple(self._coordinates[task, device].tolist()): (task, device)
            for task in range(tasks)
            for device in range(devices)
        }

    def __repr__(self) -> str:
        tasks, devices = self.num_tasks, self.num_tpus_per_task
        return (
            f"Topology(mesh_shape={self._mesh_shape.tolist()}, "
            f"{with_noun(tasks, 'task')} of {with_noun(devices, 'device')})"
        )


def _task_name(job: str | None, task: int) -> str:
    return f"/task:{task}" if job is None else f"/job:{job}/task:{task}"


# TensorFlow's message is a protocol buffer with these fields.
_MESH_SHAPE, _TASKS, _DEVICES, _COORDINATES = 1, 2, 3, 4
_NUMBER, _BYTES = 0, 2  # how values are written
_SIZES = {1: 8, 5: 4}  # of other kinds of values


def _field(field: int, value: int | list[int]) -> bytes:
    """A field as bytes; none if it is empty or 0, as TensorFlow leaves it out."""
    if not value:
        return b""
    if isinstance(value, int):
        return _varints([field << 3 | _NUMBER, value])
    packed = _varints(value)
    return _varints([field << 3 | _BYTES, len(packed)]) + packed


def _parsed(serialized: bytes) -> tuple[list[int], Integers]:
    """The shape of the mesh and the coordinates in a serialized topology."""
    fields = collections.defaultdict[int, bytes](bytes)
    try:
        data, at = bytes(memoryview(serialized)), 0
        while at < len(data):
            key, at = _varint(data, at)
            kind, start = key & 7, at
            if kind == _NUMBER:
                _, at = _varint(data, at)
            else:
                known = kind != _BYTES
                size, start = (_SIZES[kind], at) if known else _varint(data, at)
                at = start + size
            if at > len(data):
                raise IndexError("it ends too early")
            fields[key >> 3] += data[start:at]
        tasks, devices = ([0, *_numbers(fields[k])][-1] for k in (_TASKS, _DEVICES))
        mesh_shape = _numbers(fields[_MESH_SHAPE])
        coordinates = _numbers(fields[_COORDINATES])
    except (LookupError, TypeError):  # it ends too early; it has no bytes
        raise ValueError(
            "A serialized topology was wanted, as `Topology.serialized()` makes "
            f"it; got {shown(serialized)}."
        ) from None
    shape = tasks, devices, len(mesh_shape)
    if len(coordinates) != math.prod(shape):
        raise ValueError(
            f"The serialized topology of {tasks} tasks of {devices} devices has "
            f"{len(coordinates)} coordinates; {math.prod(shape)} were wanted."
        )
    return mesh_shape, np.asarray(coordinates, np.int64).reshape(shape)


def _numbers(packed: bytes) -> list[int]:
    found, at = [], 0
    while at < len(packed):
        number, at = _varint(packed, at)
        found.append(number)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, which is written in groups of 7 bits, and where the next one begins."""
    end = at
    while data[end] & 0x80:
        end += 1
    groups = enumerate(data[at : end + 1])
    return sum((byte & 0x7F) << 7 * i for i, byte in groups), end + 1


def _varints(numbers: list[int]) -> bytes:
    found = bytearray()
    for number in numbers:
        while number > 0x7F:
            found.append(number & 0x7F | 0x80)
            number >>= 7
        found.append(number)
    return bytes(found)


def _checked_mesh(given: object) -> tuple[int, ...]:
    shape = several_whole(given)
    if shape is None or len(shape) != len(AXES) or min(shape) < 1:
        raise ValueError(
            "`mesh_shape` must be a sequence of 4 positive entries, the sizes along "
            f"{', '.join(AXES)}; got {shown(given)}."
        )
    return shape


def _checked_coordinates(given: Nested | None, mesh_shape: Integers) -> Integers:
    found = integers(given)
    if found is None or found.ndim != 3 or found.shape[-1] != len(mesh_shape):
        raise ValueError(
            "`device_coordinates` must be a rank 3 array of whole numbers, "
            f"[task, device, {len(mesh_shape)}]; got {shown(given)}."
        )
    outside = ((found < 0) | (found >= mesh_shape)).any(axis=-1)
    if outside.any():
        raise ValueError(
            f"`device_coordinates` has {found[outside][0].tolist()}, which lies "
            f"outside of the mesh of shape {mesh_shape.tolist()}."
        )
    flat = found.reshape(-1, len(mesh_shape))
    if len(flat) > len(np.unique(flat, axis=0)):
        raise ValueError(
            "`device_coordinates` has the same coordinates for two devices: "
            f"{shown(found.tolist())}."
        )
    return found.astype(np.int32)


def integers(given: object) -> Integers | None:
    """The whole numbers of nested lists of one length each; None of anything else."""
    try:
        found = np.asarray(given)
    except ValueError:  # several lengths
        return None
    return found if np.issubdtype(found.dtype, np.integer) else None


_initialized: set[str] = set()
"""The names of TPUs that were initialized."""


def initialize_tpu_system(
    cluster_resolver: TPUClusterResolver | None = None,
) -> TPUTopology:
    """The topology of the devices of all processes, joined if they were not yet.

    On any platform: TPUs have the coordinates that JAX tells, other devices lie side
    by side along x. Nothing else happens: JAX has its devices from the beginning, and
    a strategy needs no call of this.

    Args:
      cluster_resolver: by default `TPUClusterResolver()`.

    Raises:
      TypeError: it is another resolver.
      ValueError: its cluster makes no sense, or processes have different numbers of
        devices.
      ClusterError: the processes could not start together.

    Warns:
      RuntimeWarning: this TPU has been initialized before.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> js.tpu.experimental.initialize_tpu_system()
    Topology(mesh_shape=[8, 1, 1, 1], 1 task of 8 devices)
    >>> js.tpu.experimental.shutdown_tpu_system()
    """
    resolver = checked_resolver(cluster_resolver)
    if resolver.tpu in _initialized:
        text.warn(
            f"The TPU system {resolver.tpu!r} has already been initialized. Its "
            "devices, and what is on them, stay as they are; the topology is the same.",
            RuntimeWarning,
        )
    rendezvous(resolver)
    _initialized.add(resolver.tpu)
    return topology_of(resolver.devices())


def shutdown_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> None:
    """Forgets that a TPU was initialized.

    JAX keeps its devices, and what is on them, until the program ends.

    Args:
      cluster_resolver: by default `TPUClusterResolver()`.

    Raises:
      TypeError: it is another resolver.
      ValueError: it is of a TPU on which this does not run.

    Warns:
      RuntimeWarning: this TPU has not been initialized.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> resolver = js.cluster_resolver.TPUClusterResolver("local")
    >>> _ = js.tpu.experimental.initialize_tpu_system(resolver)
    >>> js.tpu.experimental.shutdown_tpu_system(resolver)
    """
    resolver = checked_resolver(cluster_resolver)
    if resolver.tpu not in _initialized:
        text.warn(
            f"The TPU system {resolver.tpu!r} was to be shut down and has not been "
            "initialized.",
            RuntimeWarning,
        )
    _initialized.discard(resolver.tpu)


def checked_resolver(given: object) -> TPUClusterResolver:
    if given is None:
        return TPUClusterResolver()
    if not isinstance(given, TPUClusterResolver):
        raise TypeError(
            f"A `TPUClusterResolver` was wanted, or None, got {shown(given)}. With "
            "another resolver use `MultiWorkerMirroredStrategy(resolver)`, or leave "
            "it out: `TF_CONFIG` and what launchers set are found."
        )
    return given


def rendezvous(resolver: TPUClusterResolver) -> Processes | None:
    """The processes of a resolver's cluster, joined; None for a local TPU."""
    if resolver.is_local:
        return None
    return _job.found(default_resolver(), otherwise=resolver)


def topology_of(devices: Sequence[Device]) -> TPUTopology:
    """The topology of JAX's devices, those of process 0 first."""
    tasks = by_task(devices)
    if len({len(task) for task in tasks}) > 1:
        raise ValueError(
            "A topology has as many devices in each process, and these have "
            f"{', '.join(str(len(task)) for task in tasks)}."
        )
    ordered = [device for task in tasks for device in task]
    if all(hasattr(device, "coords") for device in ordered):
        places = _of_tpus(ordered)
    else:
        places = np.asarray([[x, 0, 0, 0] for x in range(len(ordered))])
    return TPUTopology(
        mesh_shape=(places.max(axis=0) + 1).tolist(),
        device_coordinates=places.reshape(len(tasks), -1, 4),
    )


def by_task(devices: Sequence[Device]) -> list[list[Device]]:
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    groups = itertools.groupby(ordered, key=lambda d: d.process_index)
    return [list(group) for _, group in groups]


def _of_tpus(devices: Sequence[Any]) -> Integers:
    """The coordinates of TPU cores, from 0 on; slices lie above each other."""
    found = np.asarray([[*d.coords, d.core_on_chip] for d in devices], np.int64)
    found -= found.min(axis=0)
    slices = [getattr(device, "slice_index", 0) or 0 for device in devices]
    height = found[:, 2].max() + 1
    found[:, 2] += height * (np.asarray(slices) - min(slices))
    return found
