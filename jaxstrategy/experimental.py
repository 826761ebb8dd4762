"""Names that TensorFlow keeps under `tf.distribute.experimental`."""

from jaxstrategy._options import ValueContext as ValueContext
