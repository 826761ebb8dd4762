"""The proof of what is equal on all replicas, and where values begin to differ."""
