"""Keras 3 on JAX: models that are made in `strategy.scope()` train on its devices."""
