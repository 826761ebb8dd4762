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

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy import (
        checkpoint as checkpoint,
        cluster_resolver as cluster_resolver,
        compat as compat,
        coordinator as coordinator,
        errors as errors,
        experimental as experimental,
        flax as flax,
        keras as keras,
        optax as optax,
        profiling as profiling,
        sharded as sharded,
        tpu as tpu,
        training as training,
    )
    from jaxstrategy._src.contexts.replica_context import (
        ReplicaContext as ReplicaContext,
    )
    from jaxstrategy._src.errors import (
        ClusterError as ClusterError,
        NonFiniteError as NonFiniteError,
        OutOfRangeError as OutOfRangeError,
        WorkerLost as WorkerLost,
    )
    from jaxstrategy._src.inputs.dataset import (
        DistributedDataset as DistributedDataset,
    )
    from jaxstrategy._src.inputs.input_options import (
        InputContext as InputContext,
        InputOptions as InputOptions,
        InputReplicationMode as InputReplicationMode,
    )
    from jaxstrategy._src.inputs.iterator import (
        DistributedIterator as DistributedIterator,
    )
    from jaxstrategy._src.inputs.memory_source import batches as batches
    from jaxstrategy._src.masks import (
        batch_mask as batch_mask,
        masked_mean as masked_mean,
        masked_sum as masked_sum,
    )
    from jaxstrategy._src.options import (
        ReduceOp as ReduceOp,
        RunOptions as RunOptions,
        VariableAggregation as VariableAggregation,
        VariableSynchronization as VariableSynchronization,
    )
    from jaxstrategy._src.parameter_servers.server import Server as Server
    from jaxstrategy._src.planning import plan as plan
    from jaxstrategy._src.reductions.cross_device_ops import (
        CrossDeviceOps as CrossDeviceOps,
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
        NcclAllReduce as NcclAllReduce,
        ReductionToOneDevice as ReductionToOneDevice,
    )
    from jaxstrategy._src.replicas.devices import simulate as simulate
    from jaxstrategy._src.replicas.state_sharding import StateSharding as StateSharding
    from jaxstrategy._src.strategies.current import (
        Mirrored as Mirrored,
        Sharded as Sharded,
        experimental_set_strategy as experimental_set_strategy,
        get_replica_context as get_replica_context,
        get_strategy as get_strategy,
        has_strategy as has_strategy,
        in_cross_replica_context as in_cross_replica_context,
    )
    from jaxstrategy._src.strategies.extended import (
        StrategyExtended as StrategyExtended,
    )
    from jaxstrategy._src.strategies.mirrored import (
        MirroredStrategy as MirroredStrategy,
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
        OneDeviceStrategy as OneDeviceStrategy,
    )
    from jaxstrategy._src.strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from jaxstrategy._src.strategies.strategy import Strategy as Strategy
    from jaxstrategy._src.strategies.tpu import TPUStrategy as TPUStrategy
    from jaxstrategy._src.training.to_host import to_host as to_host
    from jaxstrategy._src.values.per_replica import (
        DistributedValues as DistributedValues,
        PerReplica as PerReplica,
    )
    from jaxstrategy._src.values.slices import IndexedSlices as IndexedSlices
    from jaxstrategy._src.variables.gradients import (
        grad as grad,
        value_and_grad as value_and_grad,
    )
    from jaxstrategy._src.variables.variable import Variable as Variable
    from jaxstrategy._src.version import __version__ as __version__
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
