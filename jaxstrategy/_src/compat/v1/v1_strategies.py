"""The strategies of TensorFlow 1, each over one of today."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Self, final

from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.cluster.resolvers.tpu import TPUClusterResolver
from jaxstrategy._src.communication_options import CommunicationImplementation
from jaxstrategy._src.compat.v1.v1_extended import (
    CentralStorageExtended,
    DefaultExtended,
    MultiWorkerExtended,
    OneDeviceExtended,
    ParameterServerExtended,
)
from jaxstrategy._src.compat.v1.v1_strategy import ADAPTERS, Strategy
from jaxstrategy._src.reductions.cross_device_ops import CrossDeviceOps
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies import (
    between_graph,
    current,
    mirrored,
    multi_worker,
    strategy,
    tpu,
)
from jaxstrategy._src.text.shown import positive
from jaxstrategy._src.tpu.device_assignment import DeviceAssignment


@final
@ADAPTERS.of_type(current.DefaultStrategy)
class DefaultStrategy(Strategy):
    """One replica wherever code runs: `get_strategy()` outside any scope."""

    _extended_class = DefaultExtended


@final
@ADAPTERS.of_type(mirrored.MirroredStrategy)
class MirroredStrategy(Strategy):
    """One replica per device of this host; variables are mirrored on all of them.

    Args:
      devices: devices or their names, in replica order; by default all accelerators, or
        all CPU devices where there is none.
      cross_device_ops: how values are reduced over the replicas.

    Raises:
      ValueError: a device does not exist, or is given twice.
      TypeError: something else than devices and names, or than operations.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> v1.MirroredStrategy(js.simulate(8)[:2])
    compat.v1.MirroredStrategy(2 replicas on cpu:0, cpu:1)
    """

    def __init__(
        self,
        devices: Sequence[Device | str] | Device | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        super().__init__(mirrored.MirroredStrategy(devices, cross_device_ops))


@final
@ADAPTERS.of_type(mirrored.OneDeviceStrategy)
class OneDeviceStrategy(Strategy):
    """One replica on one device; nothing is a `PerReplica`.

    Args:
      device: a device or its name, such as `"GPU:0"`.

    Raises:
      ValueError: this host has no such device.
      TypeError: something else than a device or a name.

    >>> from jaxstrategy.compat import v1
    >>> v1.OneDeviceStrategy("CPU:0")
    compat.v1.OneDeviceStrategy(1 replica on cpu:0)
    """

    _extended_class = OneDeviceExtended

    def __init__(self, device: Device | str) -> None:
        super().__init__(mirrored.OneDeviceStrategy(device))


@final
@ADAPTERS.of_type(mirrored.CentralStorageStrategy)
class CentralStorageStrategy(Strategy):
    """One replica on each compute device; mirrored variables on one device only.

    Args:
      compute_devices: devices or their names, in replica order.
      parameter_device: where the variables are; by default the host's CPU if there are
        accelerators, else the first device.

    Raises:
      ValueError: a device does not exist, or is given twice.
      TypeError: something else than devices and names.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> devices = js.simulate(8)[:2]
    >>> v1.experimental.CentralStorageStrategy(devices).extended.parameter_devices
    (CpuDevice(id=0),)
    """

    _extended_class = CentralStorageExtended

    def __init__(
        self,
        compute_devices: Sequence[Device | str] | Device | str | None = None,
        parameter_device: Device | str | None = None,
    ) -> None:
        super().__init__(
            mirrored.CentralStorageStrategy(compute_devices, parameter_device)
        )


@final
@ADAPTERS.of_type(
    multi_worker.MultiWorkerMirroredStrategy,
    multi_worker.ExperimentalMultiWorkerMirroredStrategy,
)
class MultiWorkerMirroredStrategy(Strategy):
    """One replica per device of every process; variables are mirrored on all of them.

    Args:
      communication: how sums over the replicas are computed.
      cluster_resolver: says which processes there are; by default found.

    Raises:
      ClusterError: the processes could not start together.
      ValueError: the cluster makes no sense, or there is no such implementation.
      TypeError: something else than a resolver.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> _ = js.simulate(8)
    >>> alone = js.cluster_resolver.SimpleClusterResolver({})
    >>> v1.experimental.MultiWorkerMirroredStrategy(cluster_resolver=alone)
    compat.v1.MultiWorkerMirroredStrategy(8 replicas on cpu:0..7)
    """

    _extended_class = MultiWorkerExtended

    def __init__(
        self,
        communication: CommunicationImplementation | str = "AUTO",
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        super().__init__(
            multi_worker.ExperimentalMultiWorkerMirroredStrategy(
                communication, cluster_resolver
            )
        )


_steps_per_run: weakref.WeakKeyDictionary[strategy.Strategy, int]
_steps_per_run = weakref.WeakKeyDictionary()


@final
@ADAPTERS.of_type(tpu.TPUStrategy, tpu.ExperimentalTPUStrategy)
class TPUStrategy(Strategy):
    """Replicas on TPUs, and on any other platform.

    Args:
      tpu_cluster_resolver: by default `TPUClusterResolver()`.
      steps_per_run: how many steps TensorFlow's Estimator took in one session run; it
        is kept and does nothing.
      device_assignment: the devices of each replica.

    Raises:
      ValueError: the assignment is for other devices; `steps_per_run` is not positive.
      TypeError: something else than a resolver, an assignment or a number.
      ClusterError: the processes could not start together.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> _ = js.simulate(8)
    >>> strategy = v1.experimental.TPUStrategy()
    >>> strategy.num_replicas_in_sync, strategy.steps_per_run
    (8, 1)
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        steps_per_run: int | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        steps = 1 if steps_per_run is None else positive("steps_per_run", steps_per_run)
        core = tpu.ExperimentalTPUStrategy(tpu_cluster_resolver, device_assignment)
        _steps_per_run[core] = steps
        super().__init__(core)

    @property
    def steps_per_run(self) -> int:
        """The number that it was made with; 1 without."""
        return _steps_per_run.get(self.core, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = super().__deepcopy__(memo)
        _steps_per_run[twin.core] = self.steps_per_run
        return twin


@final
@ADAPTERS.of_type(between_graph.BetweenGraphStrategy)
class ParameterServerStrategy(Strategy):
    """Asynchronous training: each worker runs the whole program by itself.

    There is no coordinator. Each worker process makes this strategy, the same variables
    in its scope, and its own loop over `run`: a step pulls what it reads, and pushes
    what it changes as one operation of each variable. The workers do not wait for each
    other; the chief (worker 0 without one) makes the initial values. Parameter servers
    are processes with `jaxstrategy.Server(...).join()`.

    Args:
      cluster_resolver: of the cluster, by default that of `TF_CONFIG`. Without a
        cluster the strategy is one of this process's devices, with variables in the
        host's memory, or on the only device.

    Raises:
      ValueError: the cluster has no servers or workers, or it is not known which of its
        tasks this process is.
      ClusterError: a server cannot be reached, or the job has no secret.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> _ = js.simulate(8)
    >>> strategy = v1.experimental.ParameterServerStrategy()
    >>> strategy.extended.experimental_between_graph
    True
    """

    _extended_class = ParameterServerExtended

    def __init__(self, cluster_resolver: ClusterResolver | None = None) -> None:
        super().__init__(between_graph.BetweenGraphStrategy(cluster_resolver))
