"""Sums over the replicas of which each number crosses the network in 8 bits.

Every replica sums one part: it gets that part of all, as 8-bit numbers with a scale for
each block of them, and sends the sum in the same form. Scales are each sender's own: a
common one would be as large as the largest, and known only after a collective more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy.reductions import _sums
from jaxstrategy.reductions._sums import Axes, Groups

# Numbers of one scale. A mean over eight replicas of 2**16 normal numbers, each of a
# size of its own between 1e-3 and 10, misses 1.1 % with 64, 1.4 % with 256, 1.8 % with
# 1024 and 2.2 % with one scale for all; of numbers of one size 0.65, 0.77, 0.87 and
# 0.99 %. A scale takes the place of four numbers: 1.6 % more to send with 256.
BLOCK = 256
_LARGEST = 127


def summed(
    flat: jax.Array, axes: Axes, divisor: int, near: Groups | None
) -> tuple[jax.Array, jax.Array]:
    """The sum over all replicas, and what of this replica's numbers is not in it.

    The sum over the replicas of the second is what the first misses, times `divisor`.

    Args:
      flat: this replica's numbers, `[n]`, of 32 bits or more.
      axes: the mesh axes.
      divisor: what to divide the sum by.
      near: groups of replicas inside which whole numbers are summed first.

    Returns:
      Two arrays `[n]`.
    """
    if near is None:
        return _in_two_steps(flat, axes, divisor, None)
    inside = {"axis_index_groups": near, "tiled": True}
    parts = _sums.padded(flat, len(near[0])).reshape(len(near[0]), -1)
    part = lax.psum_scatter(parts.reshape(-1), axes, **inside)
    part, missed = _in_two_steps(part, axes, divisor, _sums.across(near))
    whole = lax.all_gather(part, axes, **inside)
    # Who sums a part for its group keeps what the group has not sent of it.
    missed = _at(_sums.place_in(near, axes), missed, parts)
    return whole[: flat.size], missed.reshape(-1)[: flat.size]


def _in_two_steps(
    flat: jax.Array, axes: Axes, divisor: int, groups: Groups | None
) -> tuple[jax.Array, jax.Array]:
    members = lax.axis_size(axes) if groups is None else len(groups[0])
    if members == 1:  # nothing is sent
        return flat / divisor, jnp.zeros_like(flat)
    parts = _blocks(flat, members)
    sent = _coded(parts)
    got = lax.all_to_all(sent, axes, 0, 0, axis_index_groups=groups, tiled=True)
    total = _decoded(got, flat.dtype).sum(0) / divisor
    spread = _coded(total)
    each = lax.all_gather(spread, axes, axis_index_groups=groups)
    # What the sum of a part loses on its way back is a debt of the replica that made
    # it. With a memory of sums, as in 1-bit Adam, states would depend on their number.
    lost = (total - _decoded(spread, flat.dtype)) * divisor
    missed = parts - _decoded(sent, flat.dtype)
    missed += _at(_sums.place_in(groups, axes), lost, missed)
    return _flat(_decoded(each, flat.dtype), flat), _flat(missed, flat)


def _blocks(flat: jax.Array, members: int) -> jax.Array:
    """`flat` as `[members, blocks, numbers]`, with few zeros at its end."""
    blocks = -(-flat.size // (members * BLOCK))
    return _sums.padded(flat, members * blocks).reshape(members, blocks, -1)


def _flat(blocks: jax.Array, like: jax.Array) -> jax.Array:
    return blocks.reshape(-1)[: like.size]


def _at(place: jax.Array, row: jax.Array, like: jax.Array) -> jax.Array:
    """Zeros like `like`, with `row` at `place` of the first dimension."""
    rows = lax.broadcasted_iota(jnp.int32, like.shape, 0)
    return jnp.where(rows == place, row[None], jnp.zeros((), like.dtype))


def _coded(blocks: jax.Array) -> jax.Array:
    """`[..., numbers]` as 8 bits for each number, and those of the scale.

    A block with NaN or infinity in it has such a scale, and so is NaN when it arrives.
    """
    scale = jnp.max(jnp.abs(blocks), -1, keepdims=True) / _LARGEST
    # Where all are zeros, or so small that the scale is one, none is sent.
    whole = jnp.round(blocks / jnp.where(scale == 0, 1, scale))
    whole = jnp.clip(whole, -_LARGEST, _LARGEST).astype(jnp.int8)
    bits = lax.bitcast_convert_type(scale, jnp.int8)
    return jnp.concatenate([whole, bits.reshape(*blocks.shape[:-1], -1)], -1)


def _decoded(coded: jax.Array, dtype: jnp.dtype) -> jax.Array:
    bits = coded[..., -dtype.itemsize :]
    scale = lax.bitcast_convert_type(bits, dtype)[..., None]
    return coded[..., : -dtype.itemsize].astype(dtype) * scale
