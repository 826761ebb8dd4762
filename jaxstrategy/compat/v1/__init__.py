"""Names of TensorFlow 1."""

from jaxstrategy.compat.v1 import experimental as experimental
