"""Replicas that share a device."""
