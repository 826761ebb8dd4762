"""Jitted functions that other processes call: `experimental.rpc`, as in TensorFlow."""
