"""The names of `tf.compat.v1.distribute`: a program of TensorFlow 1.x imports it so.

>>> from jaxstrategy.compat import v1 as distribute
>>> distribute.get_strategy().num_replicas_in_sync
1
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy import cluster_resolver as cluster_resolver
    from jaxstrategy._src.compat.inputs import (
        InputIterator as InputIterator,
        MultiStepContext as MultiStepContext,
    )
    from jaxstrategy._src.compat.v1 import (
        MirroredStrategy as MirroredStrategy,
        OneDeviceStrategy as OneDeviceStrategy,
        ReplicaContext as ReplicaContext,
        RunOptions as RunOptions,
        Strategy as Strategy,
        StrategyExtended as StrategyExtended,
        get_loss_reduction as get_loss_reduction,
        get_replica_context as get_replica_context,
        get_strategy as get_strategy,
    )
    from jaxstrategy._src.compat.variables_by_name import (
        AUTO_REUSE as AUTO_REUSE,
        get_variable as get_variable,
        get_variable_scope as get_variable_scope,
        variable_scope as variable_scope,
    )
    from jaxstrategy._src.inputs.input_options import (
        InputContext as InputContext,
        InputReplicationMode as InputReplicationMode,
    )
    from jaxstrategy._src.options import ReduceOp as ReduceOp
    from jaxstrategy._src.parameter_servers.server import Server as Server
    from jaxstrategy._src.reductions.cross_device_ops import (
        CrossDeviceOps as CrossDeviceOps,
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
        NcclAllReduce as NcclAllReduce,
        ReductionToOneDevice as ReductionToOneDevice,
    )
    from jaxstrategy._src.strategies.current import (
        experimental_set_strategy as experimental_set_strategy,
        has_strategy as has_strategy,
        in_cross_replica_context as in_cross_replica_context,
    )
    from jaxstrategy.compat.v1 import experimental as experimental
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
