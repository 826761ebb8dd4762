"""Sources of batches: one kind a file, chosen by protocol."""
