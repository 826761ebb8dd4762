"""From `(fn, args)` to one compiled program for all replicas."""
