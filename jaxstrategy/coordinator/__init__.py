"""Functions scheduled on workers of a `ParameterServerStrategy`; as in TensorFlow."""

from typing import NoReturn

from jaxstrategy.coordinator._cluster_coordinator import (
    ClusterCoordinator as ClusterCoordinator,
)
from jaxstrategy.coordinator._coordinator_metrics import (
    CoordinatorMetrics as CoordinatorMetrics,
)
from jaxstrategy.coordinator._durations import Durations as Durations
from jaxstrategy.coordinator._remote_value import RemoteValue as RemoteValue
from jaxstrategy.coordinator._remote_value import (
    RemoteValueStatus as RemoteValueStatus,
)
from jaxstrategy.coordinator._worker_states import WorkerActivity as WorkerActivity
from jaxstrategy.coordinator._worker_states import WorkerState as WorkerState
from jaxstrategy.coordinator._worker_states import WorkerStates as WorkerStates
from jaxstrategy.parameter_servers.backends._local_processes import (
    LocalProcesses as LocalProcesses,
)
from jaxstrategy.parameter_servers.backends._threads import Threads as Threads
from jaxstrategy.text import _absent


def __getattr__(name: str) -> NoReturn:
    """Names of TensorFlow that are not here say what to use instead."""
    raise _absent.missing(__name__, name)
