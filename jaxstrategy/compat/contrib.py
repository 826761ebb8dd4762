"""Names of `tf.contrib.distribute`, of TensorFlow 1.7 to 1.12.

`from jaxstrategy.compat import contrib as distribute` replaces
`from tensorflow.contrib import distribute`.
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.compat.adapters import (
        AllReduceCrossTowerOps as AllReduceCrossTowerOps,
    )
    from jaxstrategy._src.compat.contrib import (
        CollectiveAllReduceStrategy as CollectiveAllReduceStrategy,
        DistributionStrategy as DistributionStrategy,
        MirroredStrategy as MirroredStrategy,
        MultiStepContext as MultiStepContext,
        OneDeviceStrategy as OneDeviceStrategy,
        ParameterServerStrategy as ParameterServerStrategy,
        TPUStrategy as TPUStrategy,
    )
    from jaxstrategy._src.compat.contrib_steps import (
        Monitor as Monitor,
        StandardInputStep as StandardInputStep,
        StandardSingleLossStep as StandardSingleLossStep,
        Step as Step,
        TowerContext as TowerContext,
        UpdateContext as UpdateContext,
        get_cross_tower_context as get_cross_tower_context,
        get_distribution_strategy as get_distribution_strategy,
        get_loss_reduction as get_loss_reduction,
        get_tower_context as get_tower_context,
        get_update_device as get_update_device,
        has_distribution_strategy as has_distribution_strategy,
        increment_var as increment_var,
        require_tower_context as require_tower_context,
    )
    from jaxstrategy._src.compat.inputs import PerDeviceDataset as PerDeviceDataset
    from jaxstrategy._src.compat.variables_by_name import (
        AUTO_REUSE as AUTO_REUSE,
        get_variable as get_variable,
        get_variable_scope as get_variable_scope,
        variable_scope as variable_scope,
    )
    from jaxstrategy._src.options import (
        VariableAggregation as VariableAggregation,
        VariableSynchronization as VariableSynchronization,
    )
    from jaxstrategy._src.reductions.cross_device_ops import (
        CrossDeviceOps,
        ReductionToOneDevice,
    )
    from jaxstrategy._src.strategies.current import Mirrored as Mirrored
    from jaxstrategy._src.tpu.topology import (
        initialize_tpu_system as initialize_tpu_system,
    )
    from jaxstrategy._src.values.per_replica import PerReplica

    CrossTowerOps = CrossDeviceOps
    ReductionToOneDeviceCrossTowerOps = ReductionToOneDevice
    PerDevice = PerReplica
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
