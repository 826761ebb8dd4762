"""Names that TensorFlow 1 keeps under `distribute.experimental`."""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.compat.v1 import (
        CentralStorageStrategy as CentralStorageStrategy,
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
        ParameterServerStrategy as ParameterServerStrategy,
        TPUStrategy as TPUStrategy,
    )
    from jaxstrategy._src.options import (
        CollectiveHints as CollectiveHints,
        CommunicationImplementation as CommunicationImplementation,
        CommunicationOptions as CommunicationOptions,
    )

    CollectiveCommunication = CommunicationImplementation
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
