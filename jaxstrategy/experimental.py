"""Names that TensorFlow keeps under `experimental`."""

from jaxstrategy._options import ValueContext as ValueContext
from jaxstrategy.strategies._central import (
    CentralStorageStrategy as CentralStorageStrategy,
)
