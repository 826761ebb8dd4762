"""Resolvers: what a cluster is, and which of its processes this one is."""
