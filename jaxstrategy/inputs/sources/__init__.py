"""Where batches come from: one kind of source a file, chosen by protocol."""
