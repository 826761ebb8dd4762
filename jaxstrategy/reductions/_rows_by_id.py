"""Rows with ids: those of one id added up."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def summed_by_id(ids: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each id once, with the sum of its rows.

    The rows of an id are added in their order, as a scatter adds them.

    Shapes: ids `[n]`, rows `[n, ...]` -> ids `[n]`, sums `[n, ...]`, of which the first
    are the different ids in ascending order; after those come ids -1 with zeros.
    """
    order = jnp.argsort(ids, stable=True)
    ascending = ids[order]
    is_new = jnp.concatenate([jnp.ones(1, bool), ascending[1:] != ascending[:-1]])
    places = jnp.cumsum(is_new) - 1
    different = jnp.full_like(ids, -1).at[places].set(ascending)
    return different, jnp.zeros_like(rows).at[places].add(rows[order])
