"""Rewrites programs of `tf.distribute`: `python -m jaxstrategy.compat.port --help`."""
