"""The names of `tf.compat.v1.distribute`: a program of TensorFlow 1.x imports it so.

>>> from jaxstrategy.compat import v1 as distribute
>>> distribute.get_strategy().num_replicas_in_sync
1
"""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy import cluster_resolver as cluster_resolver
    from jaxstrategy._options import ReduceOp as ReduceOp
    from jaxstrategy.compat._older_inputs import InputIterator as InputIterator
    from jaxstrategy.compat._variables_by_name import AUTO_REUSE as AUTO_REUSE
    from jaxstrategy.compat._variables_by_name import get_variable as get_variable
    from jaxstrategy.compat._variables_by_name import (
        get_variable_scope as get_variable_scope,
    )
    from jaxstrategy.compat._variables_by_name import variable_scope as variable_scope
    from jaxstrategy.compat.v1 import experimental as experimental
    from jaxstrategy.compat.v1._v1_contexts import ReplicaContext as ReplicaContext
    from jaxstrategy.compat.v1._v1_contexts import (
        experimental_set_strategy as experimental_set_strategy,
    )
    from jaxstrategy.compat.v1._v1_contexts import (
        get_loss_reduction as get_loss_reduction,
    )
    from jaxstrategy.compat.v1._v1_contexts import (
        get_replica_context as get_replica_context,
    )
    from jaxstrategy.compat.v1._v1_contexts import get_strategy as get_strategy
    from jaxstrategy.compat.v1._v1_contexts import has_strategy as has_strategy
    from jaxstrategy.compat.v1._v1_contexts import (
        in_cross_replica_context as in_cross_replica_context,
    )
    from jaxstrategy.compat.v1._v1_extended import MultiStepContext as MultiStepContext
    from jaxstrategy.compat.v1._v1_extended import StrategyExtended as StrategyExtended
    from jaxstrategy.compat.v1._v1_strategies import (
        MirroredStrategy as MirroredStrategy,
    )
    from jaxstrategy.compat.v1._v1_strategies import (
        OneDeviceStrategy as OneDeviceStrategy,
    )
    from jaxstrategy.compat.v1._v1_strategy import RunOptions as RunOptions
    from jaxstrategy.compat.v1._v1_strategy import Strategy as Strategy
    from jaxstrategy.inputs._input_options import InputContext as InputContext
    from jaxstrategy.inputs._input_options import (
        InputReplicationMode as InputReplicationMode,
    )
    from jaxstrategy.parameter_servers._server import Server as Server
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
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "_options": "ReduceOp",
            "compat._older_inputs": "InputIterator",
            "compat._variables_by_name": (
                "AUTO_REUSE get_variable get_variable_scope variable_scope"
            ),
            "compat.v1._v1_contexts": (
                "experimental_set_strategy get_loss_reduction get_replica_context "
                "get_strategy has_strategy in_cross_replica_context ReplicaContext"
            ),
            "compat.v1._v1_extended": "MultiStepContext StrategyExtended",
            "compat.v1._v1_strategies": "MirroredStrategy OneDeviceStrategy",
            "compat.v1._v1_strategy": "RunOptions Strategy",
            "inputs._input_options": "InputContext InputReplicationMode",
            "parameter_servers._server": "Server",
            "reductions._cross_device_ops": (
                "CrossDeviceOps HierarchicalCopyAllReduce NcclAllReduce "
                "ReductionToOneDevice"
            ),
        },
        modules=["cluster_resolver", "compat.v1.experimental"],
    )
