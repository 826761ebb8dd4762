"""Backends, which write and read arrays: an abstract class, and Orbax behind it."""
