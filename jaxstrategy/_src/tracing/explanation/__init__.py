"""Explains a step without running it."""
