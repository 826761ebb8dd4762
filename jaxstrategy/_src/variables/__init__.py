"""Mutable state that knows how it is replicated, one kind a file."""
