"""Descriptions of a step, made without running it."""
