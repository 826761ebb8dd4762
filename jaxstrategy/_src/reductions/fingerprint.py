"""64 bits for each array of each replica: equal if the arrays are, bit by bit.

An array's fingerprint is a pair of sums, modulo 2**32, over its elements. Each element
contributes the two halves of a one-to-one function of its bits, another function at
each position. So a change of one element, whichever, always shows (of a complex128, in
either part); changes of several, exchanged elements too, go unseen once in 2**64.

Not `element * odd_number_of_its_position`, which would be cheaper: the sums would then
miss every change of sign of two elements, because 2**31 times anything even is 0.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstrategy._src.replicas.mesh import as_numbers
from jaxstrategy._src.values.arrays import PyTree

Word: TypeAlias = jax.Array | np.uint32

# Odd numbers, so that multiplying by them can be undone: two primes of xxHash and the
# factors of Chris Wellons' `lowbias32`.
_FIRST, _SECOND = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
_FACTORS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def fingerprints(
    tree: PyTree, gathered: Callable[[jax.Array, int], jax.Array]
) -> jax.Array:
    """The fingerprints of all arrays on all replicas: uint32 `[replicas, arrays, 2]`.

    Reads each array once, keeps nothing as large as one, and sends 8 bytes per array.
    """
    prints = jnp.stack([fingerprint(leaf) for leaf in jax.tree.leaves(tree)])
    return gathered(prints[None], 0)


@jax.jit  # one trace for all arrays of one type
def fingerprint(array: jax.Array) -> jax.Array:
    """64 bits that depend on every bit of `array` and on its position: uint32 `[2]`."""
    parts = _parts(array)
    positions = _positions(np.shape(parts[0][0]))
    terms = [
        _scattered(low, high, positions * np.uint32(len(parts)) + np.uint32(k))
        for k, (low, high) in enumerate(parts)
    ]
    first, second = (
        functools.reduce(operator.add, half) for half in zip(*terms, strict=True)
    )
    zeros = np.uint32(0), np.uint32(0)
    # One reduction of both: XLA makes it a single pass, as fast on CPU as a plain sum.
    # Two reductions keep an array of the input's size, and take three times as long.
    dimensions = tuple(range(first.ndim))
    both = lax.reduce(
        (first, second), zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), dimensions
    )
    return jnp.stack(both)


def groups(prints: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Replicas whose fingerprints `[replicas, 2]` are equal, largest group first."""
    members: dict[tuple[int, ...], list[int]] = {}
    for replica_id, pair in enumerate(prints.tolist()):
        members.setdefault(tuple(pair), []).append(replica_id)
    return tuple(sorted(map(tuple, members.values()), key=len, reverse=True))


def _scattered(low: Word, high: Word, position: Word) -> tuple[Word, Word]:
    """The bits of an element in two words that look random; can be undone."""
    first = _mixed(low + high * _FACTORS[0] + position * _FIRST)
    return first, _mixed(first + high + position * _SECOND)


def _mixed(word: Word) -> Word:
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        word = (word ^ (word >> np.uint32(shift))) * factor
    return word ^ (word >> np.uint32(16))


def _positions(shape: Sequence[int]) -> Word:
    """Each element's index in row-major order, modulo 2**32."""
    positions, stride = jnp.zeros(shape, jnp.uint32), 1
    # Not a reshaped `arange`: flattening costs a copy where layouts are tiled (TPU).
    for dimension in reversed(range(len(shape))):
        along = lax.broadcasted_iota(jnp.uint32, shape, dimension)
        positions += along * np.uint32(stride % 2**32)
        stride *= shape[dimension]
    return positions


def _parts(array: jax.Array) -> list[tuple[Word, Word]]:
    """The bits of each element as pairs of words, low and high: one pair, or two."""
    array = as_numbers(array)
    if array.dtype == jnp.complex64:
        return [(_bits(lax.real(array)), _bits(lax.imag(array)))]
    if array.dtype == jnp.complex128:
        return [_halves(lax.real(array)), _halves(lax.imag(array))]
    if array.dtype.itemsize == 8:
        return [_halves(array)]
    return [(_bits(array), np.uint32(0))]


def _halves(array: jax.Array) -> tuple[Word, Word]:
    words = lax.bitcast_convert_type(array, jnp.uint32)
    return words[..., 0], words[..., 1]


def _bits(array: jax.Array) -> Word:
    """The bits of elements of up to 32 bits."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        width = jnp.finfo(array.dtype).bits
        array = lax.bitcast_convert_type(array, jnp.dtype(f"uint{width}"))
    return array.astype(jnp.uint32)  # of a negative number, modulo 2**32
