"""Results of the shards of a data set, added up: `shard_sums`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy.text._shown import shown
from jaxstrategy.values._types import Leaf, PyTree


def shard_sums(results: Sequence[PyTree]) -> PyTree:
    """The sums of what the same function returned for each shard.

    Raises:
      TypeError: something that it returned is no number.
    """
    leaves, structure = jax.tree.flatten(results[0])
    each = [jax.tree.leaves(result) for result in results]
    sums = [_sum([row[i] for row in each]) for i in range(len(leaves))]
    return jax.tree.unflatten(structure, sums)


def _sum(leaves: Sequence[Leaf]) -> Leaf:
    first = leaves[0]
    is_number = isinstance(first, np.ndarray | np.generic | int | float)
    if not is_number or np.result_type(first) == np.bool_:
        raise TypeError(
            f"A function that was evaluated returned {shown(first)}; sums of numbers "
            "were wanted, such as of losses and of examples."
        )
    dtype = jnp.result_type(first)
    # One rounding at the end: many shards of float32 are not to lose digits.
    wide = np.float64 if jnp.issubdtype(dtype, jnp.floating) else dtype
    total = np.zeros(np.shape(first), wide)
    for leaf in leaves:
        total = total + np.asarray(leaf).astype(wide)
    return total.astype(dtype)[()]
