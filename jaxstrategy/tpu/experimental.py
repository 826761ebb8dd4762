"""The devices of a TPU and which replica has which, as in `tf.tpu.experimental`."""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.cluster.resolvers._tpu import HardwareFeature as HardwareFeature
    from jaxstrategy.cluster.resolvers._tpu import (
        TPUSystemMetadata as TPUSystemMetadata,
    )
    from jaxstrategy.tpu._device_assignment import DeviceAssignment as DeviceAssignment
    from jaxstrategy.tpu._device_order import DeviceOrderMode as DeviceOrderMode
    from jaxstrategy.tpu._tpu_system import (
        initialize_tpu_system as initialize_tpu_system,
    )
    from jaxstrategy.tpu._tpu_system import shutdown_tpu_system as shutdown_tpu_system
    from jaxstrategy.tpu._tpu_topology import TPUTopology

    Topology = TPUTopology
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "cluster.resolvers._tpu": "HardwareFeature TPUSystemMetadata",
            "tpu._device_assignment": "DeviceAssignment",
            "tpu._device_order": "DeviceOrderMode",
            "tpu._tpu_system": "initialize_tpu_system shutdown_tpu_system",
            "tpu._tpu_topology": "Topology=TPUTopology",
        },
    )
