"""`MultiWorkerMirroredStrategy`: one replica on each device of several processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

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
from jaxstrategy._src.replicas.replicas import Replicas, checked_sizes, devices_for
from jaxstrategy._src.replicas.state_sharding import StateSharding, checked_sharding
from jaxstrategy._src.strategies.choices import Choices, with_order
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.text.shown import positive


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
      sharding: a `StateSharding`: each replica keeps a part of the optimizer's state,
        or of all state. Reading what is divided over processes (`js.to_host`,
        `strategy.gather`) is then something that all of them do together.
      logical_axes: names and sizes of further axes of the mesh, such as `{"core": 2}`:
        so many devices of one process together are one replica.
      replicas_per_device: how many replicas share a device.
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
        replicas = with_order(
            Replicas.on(devices, sharding, logical_axes, sharing), communication_options
        )
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
