"""Names of the older generations of TensorFlow."""
