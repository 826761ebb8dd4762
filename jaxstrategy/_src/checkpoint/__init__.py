"""Checkpoints of training, which any strategy restores."""
