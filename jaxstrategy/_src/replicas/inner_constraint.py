"""Where arrays are to lie while a step is traced, along an inner axis: `over_axis`."""

from __future__ import annotations

import jax
from jax import lax
from jax.sharding import PartitionSpec


def over_axis(array: jax.Array, axis: str) -> jax.Array:
    """`array`, its first dimension divided over an inner axis, the others as they are.

    Args:
      array: of one replica, in a step that is being traced.
      axis: the name of an inner axis of the replicas.
    """
    others = [PartitionSpec.UNCONSTRAINED] * (array.ndim - 1)
    # No `NamedSharding` of the strategy's mesh: `jnp.zeros_like` and others refuse an
    # array that such a one constrains beside a manual axis (JAX 0.10 and 0.12).
    return lax.with_sharding_constraint(array, PartitionSpec(axis, *others))
