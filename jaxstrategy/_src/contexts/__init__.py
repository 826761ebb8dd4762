"""Contexts: the side of `run` on which code is, and what one replica sees there."""
