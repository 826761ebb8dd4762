"""The devices of each replica: as assigned, or one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstrategy.replicas import _devices
from jaxstrategy.replicas._devices import Device
from jaxstrategy.text._shown import shown
from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.tpu._device_assignment import DeviceAssignment
from jaxstrategy.tpu._tpu_system import by_task


def checked_cores(assignment: object, cores_per_replica: object) -> int:
    """The number of devices of each replica.

    Raises:
      TypeError: something else than an assignment, or than a whole number.
      ValueError: the number is not positive, or is another one than the assignment's.
    """
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
    """The devices of all replicas, those of replica 0 first.

    Raises:
      ValueError: they are no whole number of replicas, the assignment is for others, or
        has one twice or none of a process; or a replica would be in two processes.
    """
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
