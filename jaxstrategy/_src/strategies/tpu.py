"""`TPUStrategy`: replicas of one or several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import jax

from jaxstrategy._src.cluster.resolvers.tpu import TPUClusterResolver
from jaxstrategy._src.options import CommunicationOptions, checked_options
from jaxstrategy._src.processes.job import agree_on_replicas
from jaxstrategy._src.replicas.inner_axes import logical_axes
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.state_sharding import StateSharding, checked_sharding
from jaxstrategy._src.strategies import destinations
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.tpu.device_assignment import (
    DeviceAssignment,
    checked_cores,
    devices_of_replicas,
)
from jaxstrategy._src.tpu.topology import checked_resolver, rendezvous
from jaxstrategy._src.values.arrays import Value
from jaxstrategy._src.values.per_replica import Handle, PerReplica


class TPUStrategy(Strategy):
    """Replicas of one device or of several, on TPUs and on any other platform.

    Each replica has `cores_per_replica` devices, its *logical devices* 0, 1 and so on.
    All of them compute one replica's step together: what
    `experimental_split_to_logical_devices` or `jax.lax.with_sharding_constraint`
    divides over them is divided, and the numbers stay those of one device. In the mesh
    their axis is `"core"`; of a number with several prime factors there is one axis for
    each, `"core_0"`, `"core_1"`, ..., the first for the highest numbers.

    With several processes it is as `MultiWorkerMirroredStrategy`, with the devices of
    all; the devices of one replica are of one process.

    Args:
      tpu_cluster_resolver: by default `TPUClusterResolver()`, which is for all
        processes that there are; `TPUClusterResolver("local")` is for this one alone.
      experimental_device_assignment: a `js.tpu.experimental.DeviceAssignment`, which
        says which replica has which devices; by default they have one after the other.
      experimental_spmd_xla_partitioning: True: XLA divides the arrays of a replica
        over its devices. False only lets `experimental_assign_to_logical_device` be
        called, too.
      cores_per_replica: the number of devices of a replica. With an assignment, leave
        it out.
      sharding: a `StateSharding`: each replica keeps a part of the optimizer's state,
        or of all state, instead of all of it.
      communication_options: how values are reduced over the replicas.

    Raises:
      ValueError: the devices are no whole number of replicas, the assignment is for
        other devices, or a replica would be in two processes.
      TypeError: something else than a resolver, an assignment, a number or options.
      ClusterError: the processes could not start together.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> strategy = js.TPUStrategy(cores_per_replica=2)
    >>> strategy
    TPUStrategy(4 replicas of {'core': 2} on cpu:0..7)
    >>> @strategy.run
    ... def step(w, x):
    ...     x = strategy.experimental_split_to_logical_devices(x, [1, 2])
    ...     return js.get_replica_context().all_reduce("sum", x @ w)
    >>> step(np.ones((4, 3)), strategy.per_replica(np.ones((4, 2, 4)))).tolist()
    [[16.0, 16.0, 16.0], [16.0, 16.0, 16.0]]
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = True,
        *,
        cores_per_replica: int = 1,
        sharding: StateSharding | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        checked_sharding(sharding)
        checked_options(communication_options, of_strategy=True)
        cores = checked_cores(experimental_device_assignment, cores_per_replica)
        self._is_spmd = bool(experimental_spmd_xla_partitioning)
        self._resolver = checked_resolver(tpu_cluster_resolver)
        processes = rendezvous(self._resolver)
        devices = devices_of_replicas(
            self._resolver.devices(), experimental_device_assignment, cores
        )
        replicas = Replicas.on(devices, sharding, logical_axes(cores))
        agree_on_replicas(processes, replicas.description)
        self._compose(
            Choices(replicas, options=communication_options, processes=processes)
        )

    def experimental_split_to_logical_devices(
        self,
        tensor: Value | PerReplica | Handle,
        partition_dimensions: Sequence[int],
    ) -> jax.Array | PerReplica:
        """`tensor` in equal tiles on the logical devices of each replica.

        Only where it lies changes: shape, dtype and numbers stay, and so do gradients.
        If the number of logical devices is a power of 2, the tiles lie on them in
        row-major order. In a step, `tensor` is one replica's; outside, an array is
        placed so on all replicas, and a `PerReplica` each version on its own.

        Args:
          tensor: an array, a `PerReplica` or a variable.
          partition_dimensions: the number of parts of each of its dimensions; their
            product is the number of logical devices of a replica.

        Raises:
          ValueError: there are not as many numbers as dimensions, a dimension does not
            divide, or the product is another one.
          TypeError: `partition_dimensions` are no whole numbers; `tensor` is no array.
          ContextError: in another strategy's scope.

        >>> import jaxstrategy as js
        >>> _ = js.simulate(8)
        >>> strategy = js.TPUStrategy(cores_per_replica=4)
        >>> w = np.ones((16, 8), "float32")
        >>> w = strategy.experimental_split_to_logical_devices(w, [2, 2])
        >>> w.shape, w.sharding.shard_shape(w.shape)
        ((16, 8), (8, 4))
        """
        return destinations.split(self, tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(
        self, tensor: Value | PerReplica | Handle
    ) -> jax.Array | PerReplica:
        """`tensor`, of the same shape, whole on each logical device of each replica.

        Args:
          tensor: an array, a `PerReplica` or a variable.

        Raises:
          TypeError: `tensor` is no array.
          ContextError: in another strategy's scope.

        >>> import jaxstrategy as js
        >>> _ = js.simulate(8)
        >>> strategy = js.TPUStrategy(cores_per_replica=2)
        >>> w = strategy.experimental_split_to_logical_devices(np.ones(4), [2])
        >>> strategy.experimental_replicate_to_logical_devices(w).sharding.shard_shape(
        ...     w.shape
        ... )
        (4,)
        """
        return destinations.replicate(self, tensor)

    def experimental_assign_to_logical_device(
        self, tensor: Value, logical_device_id: int
    ) -> Value:
        """`tensor` as it is: XLA chooses the logical devices of what is not divided.

        Args:
          tensor: an array, of any shape.
          logical_device_id: the number of a logical device.

        Raises:
          ValueError: the strategy was made with
            `experimental_spmd_xla_partitioning=True`, or a replica has no such device.

        >>> import jaxstrategy as js
        >>> _ = js.simulate(8)
        >>> strategy = js.TPUStrategy(
        ...     experimental_spmd_xla_partitioning=False, cores_per_replica=2
        ... )
        >>> float(strategy.experimental_assign_to_logical_device(3.0, 1))
        3.0
        """
        if self._is_spmd:
            raise ValueError(
                "Cannot assign a tensor to a logical device in SPMD mode, in which all "
                "of a replica's devices compute the same program. Leave the call out, "
                "or make `TPUStrategy(experimental_spmd_xla_partitioning=False)`."
            )
        destinations.check_logical_device(logical_device_id, self._replicas)
        return tensor

    @property
    def cluster_resolver(self) -> TPUClusterResolver:
        """The resolver that was given, or that of the TPU on which this runs."""
        return self._resolver

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = super().__deepcopy__(memo)
        twin._resolver, twin._is_spmd = self._resolver, self._is_spmd
        return twin


class ExperimentalTPUStrategy(TPUStrategy):
    """`experimental.TPUStrategy`: the same with older arguments.

    Args:
      tpu_cluster_resolver: as of `TPUStrategy`.
      device_assignment: the devices of each replica.

    Raises:
      ValueError: the assignment is for other devices.
      TypeError: something else than a resolver or an assignment.
      ClusterError: the processes could not start together.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> js.experimental.TPUStrategy().num_replicas_in_sync
    8
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        # It is older than what divides a replica's arrays by itself.
        super().__init__(tpu_cluster_resolver, device_assignment, False)
