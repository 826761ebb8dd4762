"""Values of replicas: `PerReplica`, mirrored arrays, rows of a larger array."""
