"""Functions of one replica as functions of all: the one call of `shard_map`."""

from __future__ import annotations

import jax

from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values._types import Function, PyTree


def on_replicas(
    fn: Function, replicas: Replicas, in_specs: PyTree, out_specs: PyTree
) -> Function:
    """`fn` of one replica as a function of all replicas' arrays.

    Args:
      fn: takes and returns one replica's parts of arrays.
      replicas: where it runs.
      in_specs: how the arrays that it is given are divided.
      out_specs: how those that it returns are.
    """
    # check_vma=False: with True, JAX sums the gradient of a replicated value over
    # the replicas by itself, and the user's own mean of it is N times too large (JAX
    # 0.10 and 0.12).
    return jax.shard_map(
        fn,
        mesh=replicas.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
