"""Names that TensorFlow 1 keeps under `distribute.experimental`."""

from jaxstrategy.strategies._between_graph import BetweenGraphStrategy

ParameterServerStrategy = BetweenGraphStrategy
