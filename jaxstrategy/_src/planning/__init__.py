"""Layouts of a step that were never run: memory, time, and what limits them."""
