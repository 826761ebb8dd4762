"""The proof of which values are equal on all replicas."""
