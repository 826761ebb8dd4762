"""Names that TensorFlow keeps under `experimental`."""

from typing import NoReturn

from jaxstrategy import coordinator as coordinator
from jaxstrategy import rpc as rpc
from jaxstrategy._communication_options import CollectiveHints as CollectiveHints
from jaxstrategy._communication_options import (
    CommunicationImplementation as CommunicationImplementation,
)
from jaxstrategy._communication_options import (
    CommunicationOptions as CommunicationOptions,
)
from jaxstrategy._options import ValueContext as ValueContext
from jaxstrategy.cluster._processes import stragglers as stragglers
from jaxstrategy.cluster.liveness._arrivals import Stragglers as Stragglers
from jaxstrategy.preemption._config import TerminationConfig as TerminationConfig
from jaxstrategy.preemption._handler import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from jaxstrategy.preemption._watcher import PreemptionWatcher as PreemptionWatcher
from jaxstrategy.strategies._central import (
    CentralStorageStrategy as CentralStorageStrategy,
)
from jaxstrategy.strategies._multi_worker import (
    ExperimentalMultiWorkerMirroredStrategy,
)
from jaxstrategy.strategies._parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from jaxstrategy.strategies._tpu import ExperimentalTPUStrategy
from jaxstrategy.text import _absent
from jaxstrategy.tracing.replication._pure import declare_pure as declare_pure
from jaxstrategy.variables import partitioners as partitioners
from jaxstrategy.variables._embedding_lookup import embedding_lookup as embedding_lookup
from jaxstrategy.variables._sharded_variable import ShardedVariable as ShardedVariable

CollectiveCommunication = CommunicationImplementation
MultiWorkerMirroredStrategy = ExperimentalMultiWorkerMirroredStrategy
TPUStrategy = ExperimentalTPUStrategy


def __getattr__(name: str) -> NoReturn:
    """Names of TensorFlow that are not here say what to use instead."""
    raise _absent.missing(__name__, name)
