"""Compressed reductions: 8-bit numbers and PowerSGD, with error feedback.

In 8 bits, every replica sums one part: it gets that part of all, with a scale for each
block of numbers, and sends the sum in the same form. Scales are each sender's own: a
common one would be as large as the largest, and known only after a collective more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstrategy._src.options import CommunicationOptions, PowerSGD, ReduceOp
from jaxstrategy._src.reductions import operations
from jaxstrategy._src.reductions.operations import OPERATIONS, Axes, Groups, checked
from jaxstrategy._src.text import array_type, shown
from jaxstrategy._src.values.arrays import Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.slices import is_slices


class Sent(NamedTuple):
    """One array after its compressed reduction."""

    value: jax.Array  # equal on all replicas; NaN where an array was not finite
    missed: jax.Array  # what of this replica's array is not in it
    basis: jax.Array | None = None  # what the next reduction begins with


class Sums(NamedTuple):
    """The sums over the replicas, or means, that a compression is made of."""

    exact: Callable[[Sequence[Leaf]], list[Leaf]]
    # With what of this replica's array is not in the result.
    in_eight_bits: Callable[[Sequence[jax.Array]], list[tuple[jax.Array, jax.Array]]]


def memory_of(
    compression: Compression, leaf: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct | None:
    """The type of what is kept of an array that was not sent; None: all is sent."""
    is_real = jnp.issubdtype(leaf.dtype, jnp.floating)
    if not is_real or not compression.takes(leaf.shape):
        return None
    # In 16 bits what is added up over many steps would be lost itself.
    dtype = np.promote_types(jnp.promote_types(leaf.dtype, jnp.float32), np.float32)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


class Residual(NamedTuple):
    """What one leaf carries from one reduction to the next."""

    error: jax.Array  # what this replica has not sent
    basis: jax.Array | None  # what the reduction begins with


def reduce_with_memory(
    op: ReduceOp,
    leaves: Sequence[Leaf],
    owed: Sequence[Residual | None],
    compression: Compression,
    sums: Sums,
    *,
    is_alone: bool,
) -> tuple[list[Leaf], list[Residual | None]]:
    """The sum or mean of each leaf over the replicas, and what is owed now."""
    check_compressible(op)
    pairs = list(zip(leaves, owed, strict=True))
    exact = [leaf for leaf, debt in pairs if debt is None]
    arrays, bases = [], []
    for leaf, debt in pairs:
        if debt is not None:
            array = checked(op, leaf).astype(debt.error.dtype)
            arrays.append(_not_differentiable(array) + debt.error)
            bases.append(debt.basis)
    if is_alone:
        exact = sums.exact(exact)
        sent = [Sent(array, jnp.zeros_like(array)) for array in arrays]
    else:
        exact, sent = compression.reduced(exact, arrays, bases, sums)
    unsent, arrived = iter(exact), iter(sent)
    results: list[Leaf] = []
    settled: list[Residual | None] = []
    for leaf, debt in pairs:
        if debt is None:
            results.append(next(unsent))
            settled.append(None)
            continue
        value, missed, basis = next(arrived)
        # Of what is not finite nothing arrived that a step could use: who skips the
        # step finds the old debt.
        error = jnp.where(jnp.isfinite(value), missed, debt.error)
        results.append(value.astype(jnp.result_type(leaf)))
        settled.append(Residual(error, debt.basis if basis is None else basis))
    return results, settled


def check_compressible(op: ReduceOp) -> None:
    """Raise unless `op` is a sum."""
    if not OPERATIONS[op].is_sum:
        raise ValueError(
            f"{op.name} cannot be compressed, because what is not sent is added to the "
            f"next values; only {operations.sums()} can. Use `all_reduce` for it."
        )


@jax.custom_jvp
def _not_differentiable(array: jax.Array) -> jax.Array:
    return array


# Rounded numbers have the gradient 0, and thin matrices that of a decomposition: both
# would pass for the gradient of a sum without a word.
@_not_differentiable.defjvp
def _refuse(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # What JAX raises where there is no rule, so that who asks whether there is one
    # knows it.
    raise NotImplementedError(
        "A compressed reduction has no gradient: what arrives is rounded. Compress the "
        "gradients after `jax.grad` has made them; what is differentiated itself needs "
        "`get_replica_context().all_reduce`, without `compression`."
    )


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

    Both `[n]`. Inside the groups that are `near` whole numbers are summed first.
    """
    if near is None:
        return _in_two_steps(flat, axes, divisor, None)
    inside = {"axis_index_groups": near, "tiled": True}
    parts = operations.padded(flat, len(near[0])).reshape(len(near[0]), -1)
    part = lax.psum_scatter(parts.reshape(-1), axes, **inside)
    part, missed = _in_two_steps(part, axes, divisor, operations.across(near))
    whole = lax.all_gather(part, axes, **inside)
    # Who sums a part for its group keeps what the group has not sent of it.
    missed = _at(operations.place_in(near, axes), missed, parts)
    return whole[: flat.size], missed.reshape(-1)[: flat.size]


def _in_two_steps(
    flat: jax.Array,
    axes: Axes,
    divisor: int,
    groups: Groups | None,
) -> tuple[jax.Array, jax.Array]:
    members = lax.axis_size(axes) if groups is None else len(groups[0])
    if members == 1:  # nothing is sent
        return flat / divisor, jnp.zeros_like(flat)
    # `[members, blocks, numbers]`, with few zeros at the end.
    blocks = -(-flat.size // (members * BLOCK))
    parts = operations.padded(flat, members * blocks).reshape(members, blocks, -1)
    sent = _coded(parts)
    got = lax.all_to_all(sent, axes, 0, 0, axis_index_groups=groups, tiled=True)
    total = _decoded(got, flat.dtype).sum(0) / divisor
    spread = _coded(total)
    each = lax.all_gather(spread, axes, axis_index_groups=groups)
    # What the sum of a part loses on its way back is a debt of the replica that made
    # it. With a memory of sums, as in 1-bit Adam, states would depend on their number.
    lost = (total - _decoded(spread, flat.dtype)) * divisor
    missed = parts - _decoded(sent, flat.dtype)
    missed += _at(operations.place_in(groups, axes), lost, missed)
    return _flat(_decoded(each, flat.dtype), flat), _flat(missed, flat)


def _flat(blocks: jax.Array, like: jax.Array) -> jax.Array:
    return blocks.reshape(-1)[: like.size]


def _at(place: jax.Array, row: jax.Array, like: jax.Array) -> jax.Array:
    """Zeros like `like`, with `row` at `place` of the first dimension."""
    rows = lax.broadcasted_iota(jnp.int32, like.shape, 0)
    return jnp.where(rows == place, row[None], jnp.zeros((), like.dtype))


def _coded(blocks: jax.Array) -> jax.Array:
    """`[..., numbers]` as 8 bits for each number, and those of the scale."""
    # A block with NaN or infinity in it has such a scale, and so is NaN at the end.
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


@final
class EightBitNumbers:
    """Each number in 8 bits, with a scale for each block of them."""

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether it is worth while: of less than a block there is little to save."""
        return math.prod(shape) >= BLOCK

    def basis(self, leaf: jax.ShapeDtypeStruct, number: int) -> None:
        """Of the first reduction of an array: none, each begins anew."""

    def reduced(
        self,
        exact: Sequence[Leaf],
        arrays: Sequence[jax.Array],
        bases: Sequence[jax.Array | None],
        sums: Sums,
    ) -> tuple[list[Leaf], list[Sent]]:
        """The sums of `exact` with all bits, and of `arrays` compressed."""
        sent = [Sent(*each) for each in sums.in_eight_bits(arrays)]
        return sums.exact(exact), sent


# What stands in other rows and other columns than what was sent last would never be
# found: from there the iteration does not lead to it, however large its debt grows. A
# gradient of low rank arrives whole all the same.
_LITTLE = 0.01


@final
class LowRankCompression:
    """One step of power iteration on each gradient, begun where the last one ended."""

    def __init__(self, options: PowerSGD) -> None:
        self._options = options

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a matrix is compressed enough to be worth it."""
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


Compression: TypeAlias = EightBitNumbers | LowRankCompression


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
    """What arrives of `array`, `[..., columns]`, and what of it does not.

    Shapes: `span`, orthonormal, `[rows, rank]`; the others `[columns, rank]`.
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


class CompressionState(NamedTuple):
    """What compressed reductions keep from one step to the next.

    `strategy.compression_state` makes it, `optax.all_reduce_gradients` in its `init`;
    each reduction returns the next. It is part of the training state: save it with the
    parameters. Its errors belong to single replicas, so a checkpoint of it wants the
    same number of them; `strategy.reduce("mean", state)` is a state for any number,
    with the same mean of what is still to be sent.

    Attributes:
      errors: a pytree like the gradients: what each replica has not sent yet, as
        `PerReplica`s of their shapes, in 32 bits or more; None for an array that is
        reduced exactly.
      bases: the same of the directions that `PowerSGD` begins with, `[columns, rank]`
        and equal on all replicas; None where there are none.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> options = js.experimental.CommunicationOptions(compression="int8")
    >>> w = np.zeros(1000, np.float32)
    >>> strategy.compression_state(w, options)
    CompressionState(errors=PerReplica(float32[1000] on cpu:0, cpu:1), bases=None)
    """

    errors: PyTree
    bases: PyTree


def compression_of(options: CommunicationOptions | None) -> Compression:
    """The compression that options ask for."""
    asked = None if options is None else options.compression
    if asked is None:
        raise ValueError(
            f"`options` was {options!r}, which have no `compression`. Give "
            "`CommunicationOptions(compression='int8')`, or reduce exactly: "
            "`get_replica_context().all_reduce(op, value)`."
        )
    return (
        LowRankCompression(asked) if isinstance(asked, PowerSGD) else EightBitNumbers()
    )


def initial_state(
    params: PyTree, options: CommunicationOptions | None
) -> CompressionState:
    """A state in which nothing is owed, with the types of a replica's errors."""
    compression = compression_of(options)
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_slices)
    errors = [
        None if is_slices(leaf) else memory_of(compression, _type_of(leaf))
        for leaf in leaves
    ]
    bases = [
        None if memory is None else compression.basis(memory, number)
        for number, memory in enumerate(errors)
    ]
    return CompressionState(treedef.unflatten(errors), treedef.unflatten(bases))


def _type_of(leaf: Leaf) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype)


def checked_debts(
    state: object,
    leaves: Sequence[Leaf],
    paths: Sequence[str],
    treedef: TreeStructure,
    compression: Compression,
) -> list[Residual | None]:
    """What `state` says is owed of each leaf; None of those that are not compressed."""
    if not isinstance(state, CompressionState):
        raise TypeError(
            f"`state` was {shown(state)}; a `CompressionState` was wanted: what "
            "`strategy.compression_state(params, options)` or "
            "`optax.all_reduce_gradients(options=...).init(params)` made, or what the "
            "last reduction returned."
        )
    try:
        errors = treedef.flatten_up_to(state.errors)
        bases = treedef.flatten_up_to(state.bases)
    except ValueError as error:
        raise ValueError(
            f"`state` was made for another tree than what is reduced: {error}. {_MAKE}"
        ) from error
    owed: list[Residual | None] = []
    for leaf, path, error, basis in zip(leaves, paths, errors, bases, strict=True):
        if error is not None and not is_slices(leaf):
            _check(leaf, path, error, basis, compression)
        owed.append(None if error is None else Residual(error, basis))
    return owed


def state_of(
    owed: Sequence[Residual | None], treedef: TreeStructure
) -> CompressionState:
    """The state that says what is owed of each leaf."""
    return CompressionState(
        treedef.unflatten([None if debt is None else debt.error for debt in owed]),
        treedef.unflatten([None if debt is None else debt.basis for debt in owed]),
    )


_MAKE = "Make a new one: `strategy.compression_state(grads, options)`."


def _check(
    leaf: Leaf,
    path: str,
    error: jax.Array,
    basis: jax.Array | None,
    compression: Compression,
) -> None:
    given = _type_of(leaf)
    memory = memory_of(compression, given)
    if memory is None or memory.shape != error.shape or memory.dtype != error.dtype:
        raise ValueError(
            f"`value{path}` is {array_type(given.dtype, given.shape)}, and `state` has "
            f"errors {array_type(error.dtype, error.shape)} for it, which are another "
            f"array's, or another compression's. {_MAKE}"
        )
    wanted = jax.eval_shape(lambda: compression.basis(memory, 0))
    have = None if basis is None else basis.shape
    if have != (None if wanted is None else wanted.shape):
        raise ValueError(
            f"`state` has a basis of shape {have} for `value{path}`, and this "
            f"compression one of {wanted and wanted.shape}: another compression made "
            f"it. {_MAKE}"
        )
