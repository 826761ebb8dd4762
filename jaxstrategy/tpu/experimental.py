"""The devices of a TPU and which replica has which, as in `tf.tpu.experimental`."""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.cluster.resolvers.tpu import (
        TPUSystemMetadata as TPUSystemMetadata,
    )
    from jaxstrategy._src.tpu.device_assignment import (
        DeviceAssignment as DeviceAssignment,
        DeviceOrderMode as DeviceOrderMode,
    )
    from jaxstrategy._src.tpu.topology import (
        TPUTopology,
        initialize_tpu_system as initialize_tpu_system,
        shutdown_tpu_system as shutdown_tpu_system,
    )

    Topology = TPUTopology
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
