"""Strategies with one replica on each device, of one or of several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, final

import jax

from jaxstrategy._src.cluster.resolvers.cluster_resolver import (
    ClusterResolver,
    SimpleClusterResolver,
)
from jaxstrategy._src.cluster.resolvers.environment import (
    TFConfigClusterResolver,
    default_resolver,
)
from jaxstrategy._src.options import (
    CommunicationImplementation,
    CommunicationOptions,
    checked_options,
)
from jaxstrategy._src.processes import job as _job
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.reductions.cross_device_ops import CrossDeviceOps
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas, checked_sizes, devices_for
from jaxstrategy._src.replicas.state_sharding import StateSharding, checked_sharding
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.text import positive
from jaxstrategy._src.variables.policy import ReplicatedVariables


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device, through the same program as many.

    For trying a step before it is run on more devices: everything means what it means
    under `MirroredStrategy`, with one replica.

    Args:
      device: a `jax.Device` or a name such as `"GPU:0"`.

    Raises:
      ValueError: this host has no such device.
      TypeError: something else than a device or a name.

    >>> import jaxstrategy as js
    >>> js.OneDeviceStrategy("CPU:0")
    OneDeviceStrategy(1 replica on cpu:0)
    """

    def __init__(self, device: Device | str) -> None:
        super().__init__((_devices.find(device),))


@final
class MirroredStrategy(Strategy):
    """One replica per device of this host; state is mirrored on all of them.

    Args:
      devices: `jax.Device`s or names such as `"GPU:1"`, in replica order. The name of
        a platform by itself, `"GPU"`, means all its devices on this host. By default
        all accelerators, or all CPU devices where there is none.
      cross_device_ops: how values are reduced over the replicas: `NcclAllReduce`,
        `HierarchicalCopyAllReduce`, `ReductionToOneDevice`, or a `CrossDeviceOps` of
        yours. By default all-reduces, with small arrays joined.
      communication_options: the same, in more detail.
      sharding: a `StateSharding`: each replica keeps a part of the optimizer's state,
        or of all state, instead of all of it. Steps stay what they are.
      logical_axes: names and sizes of further axes of the mesh, such as `{"core": 2}`:
        so many devices together are one replica, which divides its arrays over them
        as `jax.lax.with_sharding_constraint` says.
      replicas_per_device: how many replicas share a device.
      num_replicas: how many replicas there are, whatever the devices: as many share
        each device as it takes. What a program computes is then the same on any number
        of devices that divides it; others stay idle, and a warning says so.

    Raises:
      ValueError: an empty list, a device given twice or unknown here, or devices of
        several platforms; the operations name other replicas or devices.
      TypeError: something else than devices and names, or than operations or options.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> js.MirroredStrategy()
    MirroredStrategy(8 replicas on cpu:0..7)
    >>> js.MirroredStrategy(["CPU:0", "CPU:2"])
    MirroredStrategy(2 replicas on cpu:0, cpu:2)
    >>> sharded = js.MirroredStrategy(sharding=js.StateSharding("state", min_bytes=0))
    >>> w = sharded.mirror(np.zeros((16, 3), "float32"))
    >>> w.shape, w.sharding.shard_shape(w.shape), isinstance(w, js.Sharded)
    ((16, 3), (2, 3), True)
    >>> js.MirroredStrategy(logical_axes={"core": 2})
    MirroredStrategy(4 replicas of {'core': 2} on cpu:0..7)
    >>> js.MirroredStrategy(["CPU:0", "CPU:1"], replicas_per_device=32)
    MirroredStrategy(64 replicas, 32 on each device, on cpu:0, cpu:1)
    >>> js.MirroredStrategy(num_replicas=24)
    MirroredStrategy(24 replicas, 3 on each device, on cpu:0..7)
    """

    def __init__(
        self,
        devices: Sequence[Device | str] | Device | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        sharding: StateSharding | None = None,
        logical_axes: Mapping[str, int] | None = None,
        replicas_per_device: int = 1,
        num_replicas: int | None = None,
    ) -> None:
        available = (
            _devices.default_devices() if devices is None else _devices.choose(devices)
        )
        chosen, sharing = devices_for(
            num_replicas, available, logical_axes, replicas_per_device
        )
        super().__init__(
            chosen,
            cross_device_ops,
            communication_options,
            sharding,
            logical_axes,
            sharing,
        )


@final
class CentralStorageStrategy(Strategy):
    """One replica on each compute device; mirrored variables on one device only.

    Before a step its variables are copied to all compute devices, and afterwards one
    copy goes back. Results are those of `MirroredStrategy`; between steps the variables
    take the memory of one copy. On-read variables have a copy on each compute device.
    What `reduce` and `gather` return outside a step is beside the variables.

    Args:
      compute_devices: devices or their names, in replica order; by default as for
        `MirroredStrategy`.
      parameter_device: where the variables are; by default the host's CPU if there are
        accelerators, else the first device.
      logical_axes: as of `MirroredStrategy`.
      replicas_per_device: how many replicas share a compute device.

    Raises:
      ValueError: a device does not exist, or is given twice.
      TypeError: something else than devices and names.

    >>> import jaxstrategy as js
    >>> strategy = js.experimental.CentralStorageStrategy(js.simulate(8)[:2], "CPU:0")
    >>> with strategy.scope():
    ...     total = js.Variable(0.0, name="total", aggregation="sum")
    >>> strategy.run(lambda x: total.assign_add(x), (strategy.per_replica([1.0, 2.0]),))
    Array(3., dtype=float32)
    >>> total
    Variable 'total' float32[] mirrored on 1 replica: 3.0
    """

    def __init__(
        self,
        compute_devices: Sequence[Device | str] | Device | str | None = None,
        parameter_device: Device | str | None = None,
        *,
        logical_axes: Mapping[str, int] | None = None,
        replicas_per_device: int = 1,
    ) -> None:
        devices = (
            _devices.default_devices()
            if compute_devices is None
            else _devices.choose(compute_devices)
        )
        if parameter_device is None:
            is_cpu = devices[0].platform == "cpu"
            cpu = devices[0] if is_cpu else jax.local_devices(backend="cpu")[0]
            parameter_device = cpu
        replicas = Replicas.on(
            devices, logical_axes=logical_axes, per_device=replicas_per_device
        )
        variables = ReplicatedVariables(
            replicas, Replicas.on([_devices.find(parameter_device)])
        )
        self._compose(Choices(replicas, variables=variables))


class MultiWorkerMirroredStrategy(Strategy):
    """One replica per device of every process; state is mirrored on all of them.

    Make it first, before JAX has looked for devices: it lets the processes meet and
    starts JAX's distributed runtime, once. Each process runs the same program; `run`
    takes one step on all replicas, `reduce` and `gather` are over all of them, and
    `experimental_local_results` gives those of this process. What is mirrored from a
    host, and what variables begin with, is process 0's. If nothing tells of other
    processes there is one, as with `MirroredStrategy`, and a warning says so. What
    tells of others and cannot be followed is an error: no process trains alone unasked.

    Nothing hangs without a word: the steps of all processes are compared before they
    begin, the death of a process ends the others with its name, and a step without
    progress ends the process with a report (exit codes 75 and 76).

    Args:
      cluster_resolver: says which processes there are. By default `TF_CONFIG`, or what
        `python -m jaxstrategy.launch` or SageMaker sets; without these what `torchrun`
        sets (`MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK`), or
        `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, or what
        `jax.distributed` finds (Slurm, Open MPI, Kubernetes, TPU).
      communication_options: how values are reduced; `timeout_seconds` is how long a
        step may go without progress, by default 300.
      sharding: as of `MirroredStrategy`. Reading what is divided over processes
        (`js.to_host`, `strategy.gather`) is something that all of them do together.
      logical_axes: likewise; the devices of a replica are of one process.
      replicas_per_device: likewise.
      num_replicas: how many replicas there are, whatever the processes and devices: as
        many share each device as it takes, so that a job with fewer processes computes
        the same. If the number of processes does not divide it, those that are too many
        end at once with exit code 0; devices that are too many stay idle.

    Raises:
      ClusterError: the processes could not start together, or have other replicas each,
        or the environment tells of some that cannot be joined; it says which, and why.
      ValueError: the cluster makes no sense.
      TypeError: something else than a resolver, or than options.

    Warns:
      RuntimeWarning: there is no resolver, and nothing tells of other processes.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> alone = js.cluster_resolver.SimpleClusterResolver({})
    >>> js.MultiWorkerMirroredStrategy(alone)
    MultiWorkerMirroredStrategy(8 replicas on cpu:0..7)
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        sharding: StateSharding | None = None,
        logical_axes: Mapping[str, int] | None = None,
        replicas_per_device: int = 1,
        num_replicas: int | None = None,
    ) -> None:
        checked_options(communication_options, with_timeout=True, of_strategy=True)
        checked_sharding(sharding)
        # Before processes meet: what is wrong is wrong in each of them.
        checked_sizes(logical_axes, replicas_per_device)
        if not isinstance(cluster_resolver, ClusterResolver | None):
            raise TypeError(
                f"`cluster_resolver` was {cluster_resolver!r}; a ClusterResolver of "
                "`jaxstrategy.cluster_resolver` was wanted, or None to look for one."
            )
        seconds = communication_options and communication_options.timeout_seconds
        self._resolver = cluster_resolver or default_resolver()
        if num_replicas is not None:
            num_replicas = positive("num_replicas", num_replicas)
        processes = _job.found(
            self._resolver,
            seconds or _job.TIMEOUT_SECONDS,
            num_replicas=num_replicas,
        )
        devices, sharing = devices_for(
            num_replicas,
            sorted(jax.devices(), key=lambda d: (d.process_index, d.id)),
            logical_axes,
            replicas_per_device,
        )
        replicas = Replicas.on(devices, sharding, logical_axes, sharing)
        _job.agree_on_replicas(processes, replicas.description)
        self._compose(
            Choices(
                replicas,
                options=communication_options,
                processes=processes,
                task=lambda: self.cluster_resolver._now()[1:],
            )
        )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of its cluster: the given one, or one of what was found.

        Of a cluster that JAX found by itself, the hosts as tasks of job "worker", in
        the order of the processes. Alone, an empty cluster without a task, as in
        TensorFlow.
        """
        return self._resolver or _resolver_of(self._processes)

    @property
    def process_index(self) -> int:
        """The number of this process, from 0."""
        return self._processes.index

    @property
    def process_count(self) -> int:
        """The number of processes."""
        return self._processes.count

    @property
    def _processes(self) -> Processes:
        processes = self._choices.processes
        assert processes is not None, "`__init__` has set them"
        return processes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = super().__deepcopy__(memo)
        twin._resolver = self._resolver
        return twin

    def __repr__(self) -> str:
        text = super().__repr__()
        if self._processes.count == 1:
            return text
        number = f"process {self.process_index} of {self.process_count}"
        return f"{text.removesuffix(')')}, {number})"


class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy):
    """`experimental.MultiWorkerMirroredStrategy`: the same with older arguments.

    Args:
      communication: how sums over the replicas are computed.
      cluster_resolver: as of `MultiWorkerMirroredStrategy`.

    Raises:
      ValueError: there is no such implementation.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> ring = js.experimental.CollectiveCommunication.RING
    >>> alone = js.cluster_resolver.SimpleClusterResolver({})
    >>> strategy = js.experimental.MultiWorkerMirroredStrategy(ring, alone)
    >>> isinstance(strategy, js.MultiWorkerMirroredStrategy)
    True
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = "AUTO",
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        implementation = CommunicationImplementation(communication)
        options = CommunicationOptions(implementation=implementation)
        super().__init__(cluster_resolver, options)


def _resolver_of(processes: Processes) -> ClusterResolver:
    """A resolver of the cluster that `jax.distributed` found; empty if alone."""
    if processes.count == 1:
        return TFConfigClusterResolver()
    hosts = [member.host for member in processes.store.members]
    return SimpleClusterResolver(
        {"worker": hosts}, task_type="worker", task_id=processes.index
    )
