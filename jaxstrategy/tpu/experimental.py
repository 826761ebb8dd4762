"""The devices of a TPU and which replica has which, as in `tf.tpu.experimental`."""

from jaxstrategy.cluster.resolvers._hardware_feature import (
    HardwareFeature as HardwareFeature,
)
from jaxstrategy.cluster.resolvers._tpu_system_metadata import (
    TPUSystemMetadata as TPUSystemMetadata,
)
from jaxstrategy.tpu._device_assignment import DeviceAssignment as DeviceAssignment
from jaxstrategy.tpu._device_order import DeviceOrderMode as DeviceOrderMode
from jaxstrategy.tpu._tpu_system import initialize_tpu_system as initialize_tpu_system
from jaxstrategy.tpu._tpu_system import shutdown_tpu_system as shutdown_tpu_system
from jaxstrategy.tpu._tpu_topology import TPUTopology

Topology = TPUTopology
