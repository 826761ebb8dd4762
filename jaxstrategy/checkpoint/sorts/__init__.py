"""Sorts of values in a checkpoint: how each is saved and restored, one a file."""
