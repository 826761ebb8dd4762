"""TensorFlow's `tf.distribute.Strategy` programming model for JAX.

Write a training step once; a strategy runs it on one device or on many:

>>> import jaxstrategy as js
>>> strategy = js.MirroredStrategy(js.simulate(8))
>>> @strategy.run
... def step(x):
...     return js.get_replica_context().all_reduce("mean", x)
>>> step(strategy.per_replica(list(range(8))))
Array(3.5, dtype=float32)
"""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names
from jaxstrategy.contexts import _scope_blocks

if TYPE_CHECKING:
    from jaxstrategy import checkpoint as checkpoint
    from jaxstrategy import cluster_resolver as cluster_resolver
    from jaxstrategy import compat as compat
    from jaxstrategy import coordinator as coordinator
    from jaxstrategy import experimental as experimental
    from jaxstrategy import flax as flax
    from jaxstrategy import keras as keras
    from jaxstrategy import optax as optax
    from jaxstrategy import profiling as profiling
    from jaxstrategy import sharded as sharded
    from jaxstrategy import tpu as tpu
    from jaxstrategy._communication_options import PowerSGD as PowerSGD
    from jaxstrategy._errors import CancelledError as CancelledError
    from jaxstrategy._errors import ClosureAbortedError as ClosureAbortedError
    from jaxstrategy._errors import ClosureInputError as ClosureInputError
    from jaxstrategy._errors import ClusterError as ClusterError
    from jaxstrategy._errors import CompiledStepError as CompiledStepError
    from jaxstrategy._errors import ContextError as ContextError
    from jaxstrategy._errors import DivergentCollectiveError as DivergentCollectiveError
    from jaxstrategy._errors import DonatedValueError as DonatedValueError
    from jaxstrategy._errors import DoubleReductionWarning as DoubleReductionWarning
    from jaxstrategy._errors import LateReplicaWarning as LateReplicaWarning
    from jaxstrategy._errors import LeakedTracerError as LeakedTracerError
    from jaxstrategy._errors import MissingExtraError as MissingExtraError
    from jaxstrategy._errors import NonFiniteError as NonFiniteError
    from jaxstrategy._errors import NotMirroredError as NotMirroredError
    from jaxstrategy._errors import NotMirroredVariableError as NotMirroredVariableError
    from jaxstrategy._errors import NotMirroredWarning as NotMirroredWarning
    from jaxstrategy._errors import ObjectError as ObjectError
    from jaxstrategy._errors import OutOfRangeError as OutOfRangeError
    from jaxstrategy._errors import OutOfSyncError as OutOfSyncError
    from jaxstrategy._errors import PaddedRowsWarning as PaddedRowsWarning
    from jaxstrategy._errors import ParameterServerLost as ParameterServerLost
    from jaxstrategy._errors import PlacementError as PlacementError
    from jaxstrategy._errors import RecompilationWarning as RecompilationWarning
    from jaxstrategy._errors import SimulationError as SimulationError
    from jaxstrategy._errors import TracedValueError as TracedValueError
    from jaxstrategy._errors import WholeTableWarning as WholeTableWarning
    from jaxstrategy._errors import WorkerLost as WorkerLost
    from jaxstrategy._options import ReduceOp as ReduceOp
    from jaxstrategy._options import RunOptions as RunOptions
    from jaxstrategy._options import VariableAggregation as VariableAggregation
    from jaxstrategy._options import VariableSynchronization as VariableSynchronization
    from jaxstrategy._version import __version__ as __version__
    from jaxstrategy.contexts._replica_context import ReplicaContext as ReplicaContext
    from jaxstrategy.executors._eager_replicas import eager_replicas as eager_replicas
    from jaxstrategy.executors._replicated_function import CompiledStep as CompiledStep
    from jaxstrategy.inputs._dataset import DistributedDataset as DistributedDataset
    from jaxstrategy.inputs._dataset import grouped as grouped
    from jaxstrategy.inputs._input_options import InputContext as InputContext
    from jaxstrategy.inputs._input_options import InputOptions as InputOptions
    from jaxstrategy.inputs._input_options import (
        InputReplicationMode as InputReplicationMode,
    )
    from jaxstrategy.inputs._iterator import DistributedIterator as DistributedIterator
    from jaxstrategy.inputs._memory_source import batches as batches
    from jaxstrategy.inputs._progress import progress as progress
    from jaxstrategy.masks._masked_means import batch_mask as batch_mask
    from jaxstrategy.masks._masked_means import masked_mean as masked_mean
    from jaxstrategy.masks._masked_means import masked_sum as masked_sum
    from jaxstrategy.parameter_servers._server import Server as Server
    from jaxstrategy.reductions._compression import CompressionState as CompressionState
    from jaxstrategy.reductions._cross_device_ops import (
        CrossDeviceOps as CrossDeviceOps,
    )
    from jaxstrategy.reductions._cross_device_ops import (
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    )
    from jaxstrategy.reductions._cross_device_ops import NcclAllReduce as NcclAllReduce
    from jaxstrategy.reductions._cross_device_ops import (
        ReductionToOneDevice as ReductionToOneDevice,
    )
    from jaxstrategy.replicas._compilation_cache import (
        compilation_cache as compilation_cache,
    )
    from jaxstrategy.replicas._devices import simulate as simulate
    from jaxstrategy.replicas._state_sharding import StateSharding as StateSharding
    from jaxstrategy.replicas._topology import Topology as Topology
    from jaxstrategy.strategies._current import (
        experimental_set_strategy as experimental_set_strategy,
    )
    from jaxstrategy.strategies._current import (
        get_replica_context as get_replica_context,
    )
    from jaxstrategy.strategies._current import get_strategy as get_strategy
    from jaxstrategy.strategies._current import has_strategy as has_strategy
    from jaxstrategy.strategies._current import (
        in_cross_replica_context as in_cross_replica_context,
    )
    from jaxstrategy.strategies._extended import StrategyExtended as StrategyExtended
    from jaxstrategy.strategies._mirrored import MirroredStrategy as MirroredStrategy
    from jaxstrategy.strategies._mirrored_type import Mirrored as Mirrored
    from jaxstrategy.strategies._multi_worker import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from jaxstrategy.strategies._one_device import (
        OneDeviceStrategy as OneDeviceStrategy,
    )
    from jaxstrategy.strategies._parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from jaxstrategy.strategies._sharded_type import Sharded as Sharded
    from jaxstrategy.strategies._strategy import Strategy as Strategy
    from jaxstrategy.strategies._tpu import TPUStrategy as TPUStrategy
    from jaxstrategy.tracing.explanation._explanation import Explanation as Explanation
    from jaxstrategy.training._losses import (
        compute_average_loss as compute_average_loss,
    )
    from jaxstrategy.training._losses import (
        scale_regularization_loss as scale_regularization_loss,
    )
    from jaxstrategy.training._pipeline import pipeline as pipeline
    from jaxstrategy.training._precision import DynamicLossScale as DynamicLossScale
    from jaxstrategy.training._precision import all_finite as all_finite
    from jaxstrategy.training._precision import cast_floating as cast_floating
    from jaxstrategy.training._to_host import to_host as to_host
    from jaxstrategy.training._training_loop import training_loop as training_loop
    from jaxstrategy.values._distributed_values import (
        DistributedValues as DistributedValues,
    )
    from jaxstrategy.values._per_replica import PerReplica as PerReplica
    from jaxstrategy.values._slices import IndexedSlices as IndexedSlices
    from jaxstrategy.values._versions import Versions as Versions
    from jaxstrategy.variables._gradients import grad as grad
    from jaxstrategy.variables._gradients import value_and_grad as value_and_grad
    from jaxstrategy.variables._variable import Variable as Variable
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "_communication_options": "PowerSGD",
            "_errors": (
                "CancelledError ClosureAbortedError ClosureInputError ClusterError "
                "CompiledStepError ContextError "
                "DivergentCollectiveError DonatedValueError "
                "DoubleReductionWarning LateReplicaWarning LeakedTracerError "
                "MissingExtraError NonFiniteError NotMirroredError "
                "NotMirroredVariableError NotMirroredWarning ObjectError "
                "OutOfRangeError OutOfSyncError PaddedRowsWarning "
                "ParameterServerLost PlacementError RecompilationWarning "
                "SimulationError TracedValueError WholeTableWarning WorkerLost"
            ),
            "_options": (
                "ReduceOp RunOptions VariableAggregation VariableSynchronization"
            ),
            "_version": "__version__",
            "contexts._replica_context": "ReplicaContext",
            "executors._replicated_function": "CompiledStep",
            "executors._eager_replicas": "eager_replicas",
            "inputs._dataset": "DistributedDataset grouped",
            "inputs._input_options": ("InputContext InputOptions InputReplicationMode"),
            "inputs._iterator": "DistributedIterator",
            "inputs._progress": "progress",
            "inputs._memory_source": "batches",
            "masks._masked_means": "batch_mask masked_mean masked_sum",
            "parameter_servers._server": "Server",
            "reductions._compression": "CompressionState",
            "reductions._cross_device_ops": (
                "CrossDeviceOps HierarchicalCopyAllReduce NcclAllReduce "
                "ReductionToOneDevice"
            ),
            "replicas._compilation_cache": "compilation_cache",
            "replicas._devices": "simulate",
            "replicas._state_sharding": "StateSharding",
            "replicas._topology": "Topology",
            "strategies._current": (
                "experimental_set_strategy get_replica_context get_strategy "
                "has_strategy in_cross_replica_context"
            ),
            "strategies._extended": "StrategyExtended",
            "strategies._mirrored": "MirroredStrategy",
            "strategies._mirrored_type": "Mirrored",
            "strategies._multi_worker": "MultiWorkerMirroredStrategy",
            "strategies._one_device": "OneDeviceStrategy",
            "strategies._parameter_server": "ParameterServerStrategy",
            "strategies._sharded_type": "Sharded",
            "strategies._strategy": "Strategy",
            "strategies._tpu": "TPUStrategy",
            "tracing.explanation._explanation": "Explanation",
            "training._losses": "compute_average_loss scale_regularization_loss",
            "training._pipeline": "pipeline",
            "training._precision": "DynamicLossScale all_finite cast_floating",
            "training._to_host": "to_host",
            "training._training_loop": "training_loop",
            "values._distributed_values": "DistributedValues",
            "values._per_replica": "PerReplica",
            "values._slices": "IndexedSlices",
            "values._versions": "Versions",
            "variables._gradients": "grad value_and_grad",
            "variables._variable": "Variable",
        },
        modules=[
            "checkpoint",
            "cluster_resolver",
            "compat",
            "coordinator",
            "experimental",
            "flax",
            "keras",
            "optax",
            "profiling",
            "sharded",
            "tpu",
        ],
    )

# Keras in scopes needs no call of `js.keras`.
_scope_blocks.add("jaxstrategy.keras._keras_scope")
