"""Flax NNX objects in steps."""
