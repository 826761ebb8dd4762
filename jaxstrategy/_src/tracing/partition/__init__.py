"""Steps with state that is sharded over the replicas."""
