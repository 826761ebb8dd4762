"""Names of the older generations of TensorFlow."""

from jaxstrategy.compat import contrib as contrib
from jaxstrategy.compat import v1 as v1
