"""States of compressed reductions, of all replicas: `compression_state`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxstrategy._src.communication_options import CommunicationOptions
from jaxstrategy._src.reductions.compression import CompressionState, initial_state
from jaxstrategy._src.replicas.inner_placement import (
    WHOLE,
    inner_spec,
    of_stacked,
    with_inner,
)
from jaxstrategy._src.replicas.replicas import SPLIT, Replicas
from jaxstrategy._src.values import building
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.slices import is_slices
from jaxstrategy._src.values.types import Leaf, PyTree


def compression_state(
    params: PyTree,
    options: CommunicationOptions | None,
    replicas: Replicas,
    *,
    own: bool = False,
) -> CompressionState:
    """A state in which nothing is owed, on the devices of its replicas.

    While a function is traced that builds state its arrays are placed with the rest.

    Args:
      params: a pytree of arrays like those that are reduced.
      options: with a compression.
      replicas: those that reduce.
      own: whether it is the state of one replica, as seen in a step.

    Raises:
      ValueError: the options ask for no compression.
    """
    state = initial_state(params, options)

    def zeros(
        like: Leaf, memory: jax.ShapeDtypeStruct | None
    ) -> jax.Array | PerReplica | None:
        if memory is None:
            return None
        if own or replicas.count == 1:
            return jnp.zeros(memory.shape, memory.dtype)
        shape = (replicas.count, *memory.shape)
        if is_traced:
            return PerReplica(jnp.zeros(shape, memory.dtype))
        inner = inner_spec(like, replicas) if memory.shape == like.shape else WHOLE
        where = with_inner(of_stacked(inner), replicas, SPLIT)
        return PerReplica(jnp.zeros(shape, memory.dtype, device=where))

    is_traced = isinstance(jnp.zeros(()), Tracer)
    errors = jax.tree.map(zeros, params, state.errors, is_leaf=is_slices)
    if own or is_traced:
        return CompressionState(errors, state.bases)
    return CompressionState(errors, building.replicate(state.bases, replicas))
