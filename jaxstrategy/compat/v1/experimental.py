"""Names that TensorFlow 1 keeps under `distribute.experimental`."""

from typing import NoReturn

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
from jaxstrategy.text import _absent

CollectiveCommunication = CommunicationImplementation


def __getattr__(name: str) -> NoReturn:
    """Names of TensorFlow that are not here say what to use instead."""
    raise _absent.missing(__name__, name)
