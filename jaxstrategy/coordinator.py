"""Functions scheduled on workers of a `ParameterServerStrategy`; as in TensorFlow."""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.coordinator.cluster_coordinator import (
        ClusterCoordinator as ClusterCoordinator,
    )
    from jaxstrategy._src.coordinator.datasets import (
        PerWorkerDataset as PerWorkerDataset,
        PerWorkerIterator as PerWorkerIterator,
        experimental_get_current_worker_index as experimental_get_current_worker_index,
    )
    from jaxstrategy._src.coordinator.workers import (
        CoordinatorMetrics as CoordinatorMetrics,
        Durations as Durations,
        WorkerActivity as WorkerActivity,
        WorkerState as WorkerState,
        WorkerStates as WorkerStates,
    )
    from jaxstrategy._src.parameter_servers.backends.local_processes import (
        LocalProcesses as LocalProcesses,
    )
    from jaxstrategy._src.parameter_servers.backends.ray_processes import (
        RayProcesses as RayProcesses,
    )
    from jaxstrategy._src.parameter_servers.backends.threads import Threads as Threads
    from jaxstrategy._src.scheduled.values import (
        PerWorkerValue as PerWorkerValue,
        RemoteValue as RemoteValue,
        RemoteValueStatus as RemoteValueStatus,
    )

    PerWorkerValues = PerWorkerValue
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
