"""Names that TensorFlow keeps under `experimental`."""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
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
    from jaxstrategy.preemption._preemption import (
        PreemptionCheckpointHandler as PreemptionCheckpointHandler,
    )
    from jaxstrategy.preemption._preemption import (
        PreemptionWatcher as PreemptionWatcher,
    )
    from jaxstrategy.preemption._preemption import (
        TerminationConfig as TerminationConfig,
    )
    from jaxstrategy.processes._job import stragglers as stragglers
    from jaxstrategy.processes._stragglers import Stragglers as Stragglers
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
    from jaxstrategy.tracing.replication._primitives import declare_pure as declare_pure
    from jaxstrategy.variables import partitioners as partitioners
    from jaxstrategy.variables._embedding_lookup import (
        embedding_lookup as embedding_lookup,
    )
    from jaxstrategy.variables._sharded_variable import (
        ShardedVariable as ShardedVariable,
    )

    CollectiveCommunication = CommunicationImplementation
    MultiWorkerMirroredStrategy = ExperimentalMultiWorkerMirroredStrategy
    TPUStrategy = ExperimentalTPUStrategy
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "_communication_options": (
                "CollectiveHints CommunicationImplementation CommunicationOptions "
                "CollectiveCommunication=CommunicationImplementation"
            ),
            "_options": "ValueContext",
            "processes._job": "stragglers",
            "processes._stragglers": "Stragglers",
            "preemption._preemption": (
                "PreemptionCheckpointHandler PreemptionWatcher TerminationConfig"
            ),
            "strategies._central": "CentralStorageStrategy",
            "strategies._parameter_server": "ParameterServerStrategy",
            "tracing.replication._primitives": "declare_pure",
            "variables._embedding_lookup": "embedding_lookup",
            "variables._sharded_variable": "ShardedVariable",
            "strategies._multi_worker": (
                "MultiWorkerMirroredStrategy=ExperimentalMultiWorkerMirroredStrategy"
            ),
            "strategies._tpu": "TPUStrategy=ExperimentalTPUStrategy",
        },
        modules=["coordinator", "rpc", "variables.partitioners"],
    )
