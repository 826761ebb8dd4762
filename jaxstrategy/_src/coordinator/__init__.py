"""Functions scheduled on workers of a `ParameterServerStrategy`; as in TensorFlow."""
