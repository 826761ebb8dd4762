"""The devices of a TPU and which replica has which, as in `tf.tpu.experimental`."""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.cluster.resolvers._tpu import HardwareFeature as HardwareFeature
    from jaxstrategy.cluster.resolvers._tpu import (
        TPUSystemMetadata as TPUSystemMetadata,
    )
    from jaxstrategy.tpu._device_assignment import DeviceAssignment as DeviceAssignment
    from jaxstrategy.tpu._device_assignment import DeviceOrderMode as DeviceOrderMode
    from jaxstrategy.tpu._topology import TPUTopology
    from jaxstrategy.tpu._topology import initialize_tpu_system as initialize_tpu_system
    from jaxstrategy.tpu._topology import shutdown_tpu_system as shutdown_tpu_system

    Topology = TPUTopology
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "cluster.resolvers._tpu": "HardwareFeature TPUSystemMetadata",
            "tpu._device_assignment": "DeviceAssignment DeviceOrderMode",
            "tpu._topology": (
                "initialize_tpu_system shutdown_tpu_system Topology=TPUTopology"
            ),
        },
    )
