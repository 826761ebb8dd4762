"""Flax layers and helpers that know the replicas of the current strategy."""
