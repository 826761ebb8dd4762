"""Host data to `PerReplica` batches."""
