"""Replicas that share a device, under `jax.vmap`."""
