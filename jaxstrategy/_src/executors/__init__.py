"""Executors: how the steps of a strategy run, compiled for all replicas or eagerly."""
