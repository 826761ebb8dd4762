"""Replicas and devices: which there are, where arrays lie on them, how far they are."""
