"""Functions scheduled on workers of a `ParameterServerStrategy`; as in TensorFlow."""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.coordinator._cluster_coordinator import (
        ClusterCoordinator as ClusterCoordinator,
    )
    from jaxstrategy.coordinator._datasets import PerWorkerDataset as PerWorkerDataset
    from jaxstrategy.coordinator._datasets import PerWorkerIterator as PerWorkerIterator
    from jaxstrategy.coordinator._datasets import (
        experimental_get_current_worker_index as experimental_get_current_worker_index,
    )
    from jaxstrategy.coordinator._values import PerWorkerValue as PerWorkerValue
    from jaxstrategy.coordinator._values import RemoteValue as RemoteValue
    from jaxstrategy.coordinator._values import RemoteValueStatus as RemoteValueStatus
    from jaxstrategy.coordinator._worker_states import (
        CoordinatorMetrics as CoordinatorMetrics,
    )
    from jaxstrategy.coordinator._worker_states import Durations as Durations
    from jaxstrategy.coordinator._worker_states import WorkerActivity as WorkerActivity
    from jaxstrategy.coordinator._worker_states import WorkerState as WorkerState
    from jaxstrategy.coordinator._worker_states import WorkerStates as WorkerStates
    from jaxstrategy.parameter_servers.backends._local_processes import (
        LocalProcesses as LocalProcesses,
    )
    from jaxstrategy.parameter_servers.backends._ray_processes import (
        RayProcesses as RayProcesses,
    )
    from jaxstrategy.parameter_servers.backends._threads import Threads as Threads

    PerWorkerValues = PerWorkerValue
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "coordinator._cluster_coordinator": "ClusterCoordinator",
            "coordinator._datasets": (
                "PerWorkerDataset PerWorkerIterator "
                "experimental_get_current_worker_index"
            ),
            "coordinator._values": (
                "PerWorkerValue PerWorkerValues=PerWorkerValue "
                "RemoteValue RemoteValueStatus"
            ),
            "coordinator._worker_states": (
                "CoordinatorMetrics Durations WorkerActivity WorkerState WorkerStates"
            ),
            "parameter_servers.backends._local_processes": "LocalProcesses",
            "parameter_servers.backends._ray_processes": "RayProcesses",
            "parameter_servers.backends._threads": "Threads",
        },
    )
