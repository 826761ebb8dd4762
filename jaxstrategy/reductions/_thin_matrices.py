"""Gradients that are sent as products of thin matrices: `ThinMatrices`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstrategy._communication_options import PowerSGD
from jaxstrategy.reductions._compression import Compression, Sent, Sums
from jaxstrategy.values._types import Leaf

# What stands in other rows and other columns than what was sent last would never be
# found: from there the iteration does not lead to it, however large its debt grows. A
# gradient of low rank arrives whole all the same.
_LITTLE = 0.01


@final
class ThinMatrices(Compression):
    """One step of power iteration on each gradient, begun where the last one ended.

    Args:
      options: the rank, and what is compressed at all.
    """

    def __init__(self, options: PowerSGD) -> None:
        self._options = options

    def takes(self, shape: Sequence[int]) -> bool:
        """Matrices of which little enough is sent."""
        if len(shape) < 2 or 0 in shape:
            return False
        rows, columns, rank = math.prod(shape[:-1]), shape[-1], self._options.rank
        sent = rank * (rows + columns) * self._options.min_compression_rate
        return rank <= min(rows, columns) and sent <= rows * columns

    def basis(self, leaf: jax.ShapeDtypeStruct, number: int) -> jax.Array:
        """Random directions, `[columns, rank]`, the same on all replicas."""
        key = jax.random.key(number, impl="threefry2x32")
        shape = leaf.shape[-1], self._options.rank
        drawn = jax.random.normal(key, shape, leaf.dtype)
        return drawn / jnp.linalg.norm(drawn, axis=0, keepdims=True)

    def reduced(
        self,
        exact: Sequence[Leaf],
        arrays: Sequence[jax.Array],
        bases: Sequence[jax.Array | None],
        sums: Sums,
    ) -> tuple[list[Leaf], list[Sent]]:
        """Two reductions of thin matrices; what is exact goes with the first."""
        matrices = [array.reshape(-1, array.shape[-1]) for array in arrays]
        known = [basis for basis in bases if basis is not None]
        thin = [
            _product(matrix, _disturbed(basis))
            for matrix, basis in zip(matrices, known, strict=True)
        ]
        first = sums.exact([*exact, *thin])
        spans = [jnp.linalg.qr(each)[0] for each in first[len(exact) :]]
        own = [_product(m.T, span) for m, span in zip(matrices, spans, strict=True)]
        total = sums.exact(own)
        sent = [
            _sent(*each) for each in zip(arrays, spans, own, total, known, strict=True)
        ]
        return first[: len(exact)], sent


def _disturbed(basis: jax.Array) -> jax.Array:
    """`basis`, of columns of length 1, with a little of all directions in it."""
    # Multiples of the golden ratio, modulo 1, lie evenly and follow no pattern that a
    # gradient could have. Random numbers take 20 ms more of compiling for each matrix.
    numbers = lax.iota(jnp.uint32, basis.size) * np.uint32(0x9E3779B9)
    even = numbers.astype(basis.dtype) / 2.0**32 - 0.5
    length_1 = even.reshape(basis.shape) * math.sqrt(12 / basis.shape[0])
    return basis + _LITTLE * length_1


def _sent(
    array: jax.Array,
    span: jax.Array,
    own: jax.Array,
    total: jax.Array,
    basis: jax.Array,
) -> Sent:
    """What arrives of `array`, and what of it does not.

    Args:
      array: this replica's, `[..., columns]`.
      span: the directions of rows that are sent, `[rows, rank]`, orthonormal.
      own: this replica's part in them, `[columns, rank]`.
      total: the sum or mean of the parts.
      basis: what the iteration began with, `[columns, rank]`.
    """
    is_finite = jnp.all(jnp.isfinite(total)) & jnp.all(jnp.isfinite(span))
    value = jnp.where(is_finite, _product(span, total.T), jnp.nan)
    # Less what this replica has sent, not less the mean: then what replicas differ in
    # would grow with each step, in each memory with another sign.
    missed = array - _product(span, own.T).reshape(array.shape)
    # Of length 1, or the product of two gradients could overflow, or be nothing.
    norms = jnp.linalg.norm(total, axis=0, keepdims=True)
    basis = jnp.where(is_finite, total / jnp.where(norms > 0, norms, 1), basis)
    return Sent(value.reshape(array.shape), missed, basis)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    # What is sent must be what is taken off: not in the 16 bits of a TPU's default.
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)
