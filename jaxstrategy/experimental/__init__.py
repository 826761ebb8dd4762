"""Names that TensorFlow keeps under `experimental`."""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy import coordinator as coordinator
    from jaxstrategy._src.executors.eager_replicas import (
        eager_replicas as eager_replicas,
    )
    from jaxstrategy._src.executors.executor import CompiledStep as CompiledStep
    from jaxstrategy._src.inputs.dataset import grouped as grouped
    from jaxstrategy._src.options import (
        CollectiveHints as CollectiveHints,
        CommunicationImplementation as CommunicationImplementation,
        CommunicationOptions as CommunicationOptions,
        PowerSGD as PowerSGD,
        ValueContext as ValueContext,
    )
    from jaxstrategy._src.preemption import (
        PreemptionCheckpointHandler as PreemptionCheckpointHandler,
        PreemptionWatcher as PreemptionWatcher,
        TerminationConfig as TerminationConfig,
    )
    from jaxstrategy._src.processes.job import stragglers as stragglers
    from jaxstrategy._src.processes.stragglers import Stragglers as Stragglers
    from jaxstrategy._src.reductions.compression import (
        CompressionState as CompressionState,
    )
    from jaxstrategy._src.replicas.devices import compilation_cache as compilation_cache
    from jaxstrategy._src.strategies.mirrored import (
        CentralStorageStrategy as CentralStorageStrategy,
        ExperimentalMultiWorkerMirroredStrategy,
    )
    from jaxstrategy._src.strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from jaxstrategy._src.strategies.tpu import ExperimentalTPUStrategy
    from jaxstrategy._src.tracing.replication.primitives import (
        declare_pure as declare_pure,
    )
    from jaxstrategy._src.values.slices import Versions as Versions
    from jaxstrategy._src.variables.sharded_variable import (
        ShardedVariable as ShardedVariable,
        embedding_lookup as embedding_lookup,
    )
    from jaxstrategy.experimental import partitioners as partitioners, rpc as rpc

    CollectiveCommunication = CommunicationImplementation
    MultiWorkerMirroredStrategy = ExperimentalMultiWorkerMirroredStrategy
    TPUStrategy = ExperimentalTPUStrategy
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
