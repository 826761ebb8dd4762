"""Names of `tf.contrib.distribute`, of TensorFlow 1.7 to 1.12.

`from jaxstrategy.compat import contrib as distribute` replaces
`from tensorflow.contrib import distribute`.
"""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy._options import VariableAggregation as VariableAggregation
    from jaxstrategy._options import VariableSynchronization as VariableSynchronization
    from jaxstrategy.compat._variables_by_name import AUTO_REUSE as AUTO_REUSE
    from jaxstrategy.compat._variables_by_name import get_variable as get_variable
    from jaxstrategy.compat._variables_by_name import (
        get_variable_scope as get_variable_scope,
    )
    from jaxstrategy.compat._variables_by_name import variable_scope as variable_scope
    from jaxstrategy.compat.contrib._contrib_strategies import (
        AllReduceCrossTowerOps as AllReduceCrossTowerOps,
    )
    from jaxstrategy.compat.contrib._contrib_strategies import (
        CollectiveAllReduceStrategy as CollectiveAllReduceStrategy,
    )
    from jaxstrategy.compat.contrib._contrib_strategies import (
        MirroredStrategy as MirroredStrategy,
    )
    from jaxstrategy.compat.contrib._contrib_strategies import (
        OneDeviceStrategy as OneDeviceStrategy,
    )
    from jaxstrategy.compat.contrib._contrib_strategies import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from jaxstrategy.compat.contrib._contrib_strategies import (
        TPUStrategy as TPUStrategy,
    )
    from jaxstrategy.compat.contrib._distribution_strategy import (
        DistributionStrategy as DistributionStrategy,
    )
    from jaxstrategy.compat.contrib._distribution_strategy import (
        MultiStepContext as MultiStepContext,
    )
    from jaxstrategy.compat.contrib._distribution_strategy import (
        PerDeviceDataset as PerDeviceDataset,
    )
    from jaxstrategy.compat.contrib._standard_steps import Monitor as Monitor
    from jaxstrategy.compat.contrib._standard_steps import (
        StandardInputStep as StandardInputStep,
    )
    from jaxstrategy.compat.contrib._standard_steps import (
        StandardSingleLossStep as StandardSingleLossStep,
    )
    from jaxstrategy.compat.contrib._standard_steps import Step as Step
    from jaxstrategy.compat.contrib._tower_context import TowerContext as TowerContext
    from jaxstrategy.compat.contrib._tower_context import UpdateContext as UpdateContext
    from jaxstrategy.compat.contrib._tower_context import (
        get_cross_tower_context as get_cross_tower_context,
    )
    from jaxstrategy.compat.contrib._tower_context import (
        get_distribution_strategy as get_distribution_strategy,
    )
    from jaxstrategy.compat.contrib._tower_context import (
        get_loss_reduction as get_loss_reduction,
    )
    from jaxstrategy.compat.contrib._tower_context import (
        get_tower_context as get_tower_context,
    )
    from jaxstrategy.compat.contrib._tower_context import (
        get_update_device as get_update_device,
    )
    from jaxstrategy.compat.contrib._tower_context import (
        has_distribution_strategy as has_distribution_strategy,
    )
    from jaxstrategy.compat.contrib._tower_context import increment_var as increment_var
    from jaxstrategy.compat.contrib._tower_context import (
        require_tower_context as require_tower_context,
    )
    from jaxstrategy.reductions._cross_device_ops import (
        CrossDeviceOps,
        ReductionToOneDevice,
    )
    from jaxstrategy.strategies._mirrored_type import Mirrored as Mirrored
    from jaxstrategy.tpu._topology import initialize_tpu_system as initialize_tpu_system
    from jaxstrategy.values._per_replica import PerReplica

    CrossTowerOps = CrossDeviceOps
    ReductionToOneDeviceCrossTowerOps = ReductionToOneDevice
    PerDevice = PerReplica
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "_options": "VariableAggregation VariableSynchronization",
            "compat._variables_by_name": (
                "AUTO_REUSE get_variable get_variable_scope variable_scope"
            ),
            "compat.contrib._contrib_strategies": (
                "AllReduceCrossTowerOps CollectiveAllReduceStrategy MirroredStrategy "
                "OneDeviceStrategy ParameterServerStrategy TPUStrategy"
            ),
            "compat.contrib._distribution_strategy": (
                "DistributionStrategy MultiStepContext PerDeviceDataset"
            ),
            "compat.contrib._standard_steps": (
                "Monitor StandardInputStep StandardSingleLossStep Step"
            ),
            "compat.contrib._tower_context": (
                "get_cross_tower_context get_distribution_strategy get_loss_reduction "
                "get_tower_context get_update_device has_distribution_strategy "
                "increment_var require_tower_context TowerContext UpdateContext"
            ),
            "reductions._cross_device_ops": (
                "CrossTowerOps=CrossDeviceOps "
                "ReductionToOneDeviceCrossTowerOps=ReductionToOneDevice"
            ),
            "strategies._mirrored_type": "Mirrored",
            "tpu._topology": "initialize_tpu_system",
            "values._per_replica": "PerDevice=PerReplica",
        },
    )
