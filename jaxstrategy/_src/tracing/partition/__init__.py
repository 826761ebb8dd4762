"""A step whose state is divided over the replicas, as passes over its trace."""
