"""Names that TensorFlow 1 keeps under `distribute.experimental`."""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy._communication_options import CollectiveHints as CollectiveHints
    from jaxstrategy._communication_options import (
        CommunicationImplementation as CommunicationImplementation,
    )
    from jaxstrategy._communication_options import (
        CommunicationOptions as CommunicationOptions,
    )
    from jaxstrategy.compat.v1._v1_strategies import (
        CentralStorageStrategy as CentralStorageStrategy,
    )
    from jaxstrategy.compat.v1._v1_strategies import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from jaxstrategy.compat.v1._v1_strategies import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from jaxstrategy.compat.v1._v1_strategies import TPUStrategy as TPUStrategy

    CollectiveCommunication = CommunicationImplementation
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "_communication_options": (
                "CollectiveHints CommunicationImplementation CommunicationOptions "
                "CollectiveCommunication=CommunicationImplementation"
            ),
            "compat.v1._v1_strategies": (
                "CentralStorageStrategy MultiWorkerMirroredStrategy "
                "ParameterServerStrategy TPUStrategy"
            ),
        },
    )
