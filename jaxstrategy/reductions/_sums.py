"""The sum of one array per replica, each function another lowering.

Every function takes this replica's array, the axes of the replicas and what to divide
the sum by (1, or the number of replicas for a mean); every replica gets the result. All
have the same gradient: the same sum of the incoming gradients.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]
Sum = Callable[[jax.Array, Axes, int], jax.Array]
Groups = tuple[tuple[int, ...], ...]


def direct(array: jax.Array, axes: Axes, divisor: int) -> jax.Array:
    """One all-reduce, however XLA and its library do it."""
    return _divided(lax.psum(array, axes), divisor)


def all_direct(
    arrays: Sequence[jax.Array], axes: Axes, divisor: int
) -> list[jax.Array]:
    """As `direct` of each array, in equations in a row."""
    sums = lax.psum([unfolded(array) for array in arrays], axes)
    return [unfolded(_divided(each, divisor)) for each in sums]


def ring(array: jax.Array, axes: Axes, divisor: int) -> jax.Array:
    """A reduce-scatter, then an all-gather, as around a ring.

    Each replica sums one part of the array. P. Patarasuk, X. Yuan. Bandwidth optimal
    all-reduce algorithms for clusters of workstations. J. Parallel Distrib. Comput. 69
    (2009) 117-124.
    """
    if lax.axis_size(axes) == 1:  # which XLA would not see
        return direct(array, axes, divisor)
    flat = padded(array, lax.axis_size(axes))
    part = _divided(lax.psum_scatter(flat, axes, tiled=True), divisor)
    return _restored(lax.all_gather(part, axes, tiled=True), array)


def hierarchical(
    array: jax.Array, axes: Axes, divisor: int, *, groups: Groups
) -> jax.Array:
    """A sum inside each group, then between groups, then inside groups to all.

    Between groups, where links are slow, goes one part of the array per replica.

    Args:
      array: this replica's.
      axes: the mesh axis.
      divisor: see the module.
      groups: replicas that are close to each other, in groups of one size.
    """
    if lax.axis_size(axes) == 1:  # which XLA would not see
        return direct(array, axes, divisor)
    flat = padded(array, len(groups[0]))
    inside = {"axis_index_groups": groups, "tiled": True}
    part = lax.psum_scatter(flat, axes, **inside)
    part = lax.psum(part, axes, axis_index_groups=across(groups))
    return _restored(lax.all_gather(_divided(part, divisor), axes, **inside), array)


def to_one_device(
    array: jax.Array,
    axes: Axes,
    divisor: int,
    *,
    root: int,
    accumulate: Callable[[Sequence[jax.Array]], jax.Array],
) -> jax.Array:
    """Every array goes to one replica, which sums them; the sum goes to all.

    Args:
      array: this replica's.
      axes: the mesh axis.
      divisor: see the module.
      root: the replica that sums.
      accumulate: the sum of the arrays of all replicas, in order.
    """
    versions = [
        array if replica == root else lax.ppermute(array, axes, [(replica, root)])
        for replica in range(lax.axis_size(axes))
    ]
    total = _divided(accumulate(versions), divisor)
    is_root = lax.axis_index(axes) == root
    return lax.psum(jnp.where(is_root, total, jnp.zeros_like(total)), axes)


def grouped(array: jax.Array, axes: Axes, divisor: int, *, groups: Groups) -> jax.Array:
    """The sum over the replica's own group; `divisor` counts those of one group."""
    return _divided(lax.psum(array, axes, axis_index_groups=groups), divisor)


def across(groups: Groups) -> Groups:
    """The groups of those who have the same place in `groups`, in the same order."""
    return tuple(zip(*groups, strict=True))


def place_in(groups: Groups | None, axes: Axes) -> jax.Array:
    """The place of this replica among all, or in its group."""
    if groups is None:
        return lax.axis_index(axes)
    places = {member: i for group in groups for i, member in enumerate(group)}
    return jnp.asarray([places[i] for i in range(len(places))])[lax.axis_index(axes)]


def in_order(versions: Sequence[jax.Array]) -> jax.Array:
    """The sum of these arrays, from the first to the last."""
    return functools.reduce(operator.add, versions)


def _divided(array: jax.Array, divisor: int) -> jax.Array:
    return array if divisor == 1 else array / divisor


def padded(array: jax.Array, parts: int) -> jax.Array:
    """`array` flat, with zeros up to a multiple of `parts`."""
    flat: Any = array.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % parts))


def _restored(flat: jax.Array, like: jax.Array) -> jax.Array:
    return flat[: like.size].reshape(like.shape)


def unfolded(array: jax.Array) -> jax.Array:
    """`array`, with nothing known of it while it is compiled if it is complex.

    XLA computes the sum over replicas of a constant while it compiles, and ends the
    process if that is complex (jaxlib 0.10.2 to 0.12). A sum of no rows is a constant,
    as is the gradient of a sum; so results need this, too.
    """
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return lax.optimization_barrier(array) if is_complex else array
