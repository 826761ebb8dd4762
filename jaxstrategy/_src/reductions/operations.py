"""Arithmetic of reductions: operations, sums, gathers and groups of replicas.

Each sum takes this replica's array, the axes of the replicas and what to divide by (1,
or the number of replicas for a mean); every replica gets the result. Gradients are
local: the gradient of a sum over replicas is the sum over replicas of the incoming
gradients, of a mean their mean (as in TensorFlow's `all_reduce`). A minimum or maximum
passes the summed gradient to the replicas that hold it, in equal parts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import several_whole, whole
from jaxstrategy._src.values.arrays import Leaf
from jaxstrategy._src.values.slices import IndexedSlices, is_slices

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
    """A reduce-scatter, then an all-gather, as around a ring."""
    # P. Patarasuk, X. Yuan. Bandwidth optimal all-reduce algorithms for clusters of
    # workstations. J. Parallel Distrib. Comput. 69 (2009) 117-124.
    if lax.axis_size(axes) == 1:  # which XLA would not see
        return direct(array, axes, divisor)
    flat = padded(array, lax.axis_size(axes))
    part = _divided(lax.psum_scatter(flat, axes, tiled=True), divisor)
    return _restored(lax.all_gather(part, axes, tiled=True), array)


def hierarchical(
    array: jax.Array, axes: Axes, divisor: int, *, groups: Groups
) -> jax.Array:
    """A sum inside each group, then of a part between groups, then inside to all."""
    if lax.axis_size(axes) == 1:  # which XLA would not see
        return direct(array, axes, divisor)
    flat = padded(array, len(groups[0]))
    inside = {"axis_index_groups": groups, "tiled": True}
    part = lax.psum_scatter(flat, axes, **inside)
    part = lax.psum(part, axes, axis_index_groups=across(groups))
    return _restored(lax.all_gather(_divided(part, divisor), axes, **inside), array)


def in_replica_order(
    array: jax.Array, axes: Axes, divisor: int, *, groups: Groups | None = None
) -> jax.Array:
    """A sum, over the replica's group, whose order does not depend on where they are.

    Each adds its part of all arrays in pairs, numbers 0 and 1, 2 and 3, then the sums.
    """
    is_exact = not jnp.issubdtype(array.dtype, jnp.inexact)
    if is_exact or lax.axis_size(axes) == 1:  # whole numbers have one sum
        if groups is None:
            return direct(array, axes, divisor)
        return grouped(array, axes, divisor, groups=groups)
    return _ordered(array, axes, divisor, groups)


# JAX would sum gradients in whatever order; so they go the same way.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _ordered(
    array: jax.Array, axes: Axes, divisor: int, groups: Groups | None
) -> jax.Array:
    count = lax.axis_size(axes) if groups is None else len(groups[0])
    rows = padded(array, count).reshape(count, -1)
    among = {"axis_index_groups": groups, "tiled": True}
    parts = lax.all_to_all(rows, axes, 0, 0, **among)
    part = _divided(in_pairs(list(parts)), divisor)
    return _restored(lax.all_gather(part, axes, **among), array)


_ordered.defvjp(
    lambda array, *settings: (_ordered(array, *settings), None),
    lambda axes, divisor, groups, _, g: (_ordered(g, axes, divisor, groups),),
)


def in_pairs(versions: Sequence[jax.Array]) -> jax.Array:
    """The sum of these arrays, neighbours first."""
    while len(versions) > 1:
        odd = versions[len(versions) // 2 * 2 :]
        pairs = zip(versions[::2], versions[1::2], strict=False)
        versions = [*(one + other for one, other in pairs), *odd]
    return versions[0]


def to_one_device(
    array: jax.Array,
    axes: Axes,
    divisor: int,
    *,
    root: int,
    accumulate: Callable[[Sequence[jax.Array]], jax.Array],
) -> jax.Array:
    """Every array goes to one replica, which sums them; the sum goes to all."""
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
    """`array`, with nothing known of it while it is compiled if it is complex."""
    # XLA computes the sum over replicas of a constant while it compiles, and ends the
    # process if that is complex (jaxlib 0.10.2 to 0.12). A sum of no rows is one, as is
    # the gradient of a sum; so results need this, too.
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return lax.optimization_barrier(array) if is_complex else array


@dataclasses.dataclass(frozen=True)
class ReduceOperation:
    """One row: everything that differs between reduce operations."""

    # Reduces an array over dimensions of its own.
    locally: Callable[[jax.Array, tuple[int, ...]], jax.Array]
    # The collective over replicas, or those of each group, with its derivative; None
    # where arrays are summed, as a `Plan` says.
    across: Callable[[jax.Array, Axes, Groups | None], jax.Array] | None = None
    divides: bool = False  # the sum, by the number of what was added
    # The result if so many replicas have one array.
    of_equal: Callable[[jax.Array, int], jax.Array] = lambda array, count: array

    @property
    def is_sum(self) -> bool:
        """Whether zeros change nothing, so that rows may be left out or weighted."""
        return self.across is None

    def prepared(self, array: jax.Array) -> jax.Array:
        """`array` of the dtype that is reduced."""
        # Before the sum, so that integers do not wrap on the way to their mean.
        is_kept = not self.divides or jnp.issubdtype(array.dtype, jnp.inexact)
        return array if is_kept else array.astype(float)


# JAX differentiates neither `pmin` nor `pmax` (0.10 and 0.12).
@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extreme(
    array: jax.Array,
    axes: Axes,
    groups: Groups | None,
    collective: Callable[..., jax.Array],
) -> jax.Array:
    return collective(array, axes, axis_index_groups=groups)


# The analysis of a step knows a reduced value by this function's name.
@_extreme.defjvp
def _extreme_jvp(
    axes: Axes,
    groups: Groups | None,
    collective: Callable[..., jax.Array],
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    (array,), (tangent,) = primals, tangents
    extreme = _extreme(array, axes, groups, collective)
    holds_it = (array == extreme).astype(tangent.dtype)

    def total(of: jax.Array) -> jax.Array:
        return lax.psum(of, axes, axis_index_groups=groups)

    return extreme, total(holds_it * tangent) / total(holds_it)


OPERATIONS: Mapping[ReduceOp, ReduceOperation] = {
    ReduceOp.SUM: ReduceOperation(
        lambda x, axes: jnp.sum(x, axes, dtype=x.dtype),
        of_equal=lambda x, count: x * jnp.asarray(count).astype(x.dtype),
    ),
    ReduceOp.MEAN: ReduceOperation(jnp.mean, divides=True),
    ReduceOp.MIN: ReduceOperation(
        jnp.min, lambda x, axes, groups: _extreme(x, axes, groups, lax.pmin)
    ),
    ReduceOp.MAX: ReduceOperation(
        jnp.max, lambda x, axes, groups: _extreme(x, axes, groups, lax.pmax)
    ),
}


def sums() -> str:
    """The operations that add, for messages."""
    return " and ".join(op.name for op, row in OPERATIONS.items() if row.is_sum)


def reduced_over(op: ReduceOp, value: Leaf, axis: Sequence[int]) -> jax.Array:
    """`value` reduced over its own dimensions `axis`."""
    if is_slices(value):
        raise TypeError(
            "IndexedSlices cannot be reduced along an axis. Use `axis=None`, or reduce "
            "`slices.to_dense()`."
        )
    array = checked(op, value)
    row = OPERATIONS[op]
    return row.locally(row.prepared(array), _dimensions(axis, array.ndim))


def checked(op: ReduceOp, value: Leaf) -> jax.Array:
    """`value` as an array that `op` can reduce."""
    try:
        array = mesh.array_of(value)
    except TypeError as error:
        raise TypeError(
            f"{op.name} of {value!r}: an array or a number was wanted, got "
            f"{type(value).__name__}."
        ) from error
    row = OPERATIONS[op]
    if jnp.issubdtype(array.dtype, jnp.number):
        if row.is_sum or not jnp.issubdtype(array.dtype, jnp.complexfloating):
            return array
        advice = "Complex numbers have no order; reduce `jnp.abs(value)` instead."
    elif array.dtype == jnp.bool_:
        if not row.is_sum:
            return array
        advice = "Convert it first: `value.astype('int32')` counts the true ones."
    else:
        advice = "Only numbers can be reduced."
    raise TypeError(f"{op.name} of a {array.dtype} array is not defined. {advice}")


def _dimensions(axis: Sequence[int], rank: int) -> tuple[int, ...]:
    for dimension in axis:
        if not -rank <= dimension < rank:
            raise ValueError(
                f"`axis` is {dimension}, out of range for a value with {rank} "
                f"dimensions on each replica: use {-rank} to {rank - 1}, or None."
                if rank
                else f"`axis` is {dimension}, but every replica's value is a scalar: "
                "use `axis=None`."
            )
    positions = tuple(dimension % rank for dimension in axis)
    if len(set(positions)) < len(positions):
        raise ValueError(f"`axis` {tuple(axis)} names one dimension more than once.")
    return positions


def checked_axis(axis: int) -> int:
    """`axis` as an int."""
    dimension = whole(axis)
    if dimension is None:
        raise TypeError(f"`axis` was {axis!r}; a whole number was wanted.")
    return dimension


def all_gather(value: Leaf, axis: int, replicas: Replicas) -> jax.Array:
    """Every replica's `value`, joined along dimension `axis` in replica order."""
    array = mesh.array_of(value)
    dimension = checked_axis(axis)
    if array.ndim == 0:
        raise ValueError(
            "Scalars cannot be joined along an axis. Give each replica's value a "
            "dimension first, for example `value[None]`."
        )
    if not -array.ndim <= dimension < array.ndim:
        raise ValueError(
            f"`axis` is {axis}, out of range for a value with {array.ndim} dimensions "
            f"on each replica: use {-array.ndim} to {array.ndim - 1}."
        )
    if not replicas.axes:
        return array
    axis = dimension % array.ndim
    if array.size == 0:  # XLA refuses to join nothing
        return jnp.zeros_like(jnp.concatenate([array] * replicas.count, axis))
    return lax.all_gather(array, replicas.axes, axis=axis, tiled=True)


def reduce_slices(
    op: ReduceOp, slices: IndexedSlices, replicas: Replicas
) -> IndexedSlices:
    """The rows of all replicas: their sum, or for MEAN that divided by the replicas."""
    check_sum(op)
    row = OPERATIONS[op]
    rows = row.prepared(checked(op, slices.values))
    if row.divides:
        rows /= replicas.count
    return IndexedSlices(
        all_gather(rows, 0, replicas),
        all_gather(slices.indices, 0, replicas),
        slices.dense_shape,
    )


def check_sum(op: ReduceOp) -> None:
    """Raise unless `op` is a sum: missing rows would change another result."""
    if not OPERATIONS[op].is_sum:
        raise ValueError(
            f"{op.name} of IndexedSlices is not defined, because rows that are not "
            "there count as zeros. Reduce `slices.to_dense()` instead."
        )


def near(devices: Sequence[Device]) -> Groups:
    """Replica ids in groups of devices that are close to each other."""
    by_place: dict[object, list[int]] = {}
    for replica, device in enumerate(devices):
        place = device.process_index, getattr(device, "slice_index", 0)
        by_place.setdefault(place, []).append(replica)
    groups = list(by_place.values())
    if len(groups) > 1 and len({len(group) for group in groups}) == 1:
        return tuple(map(tuple, groups))
    n = len(devices)
    count = next(count for count in range(math.isqrt(n), 0, -1) if n % count == 0)
    size = n // count
    return tuple(tuple(range(i, i + size)) for i in range(0, n, size))


def chosen_groups(groups: Sequence[Sequence[int]] | None, replicas: Replicas) -> Groups:
    """`groups`, or if there are none those of near devices."""
    if groups is None:
        return near(replicas.devices)
    return checked_groups(groups, replicas.count)


def checked_groups(groups: Sequence[Sequence[int]], replicas: int) -> Groups:
    """`groups`, which hold each replica once and are of one size."""
    found = map(several_whole, groups) if isinstance(groups, Iterable) else [None]
    given = tuple(group or () for group in found)
    members = sorted(member for group in given for member in group)
    if members != list(range(replicas)) or len({len(group) for group in given}) != 1:
        raise ValueError(
            f"`groups` was {groups!r}; groups of one size were wanted in which each "
            f"replica from 0 to {replicas - 1} stands once, such as "
            f"{[list(range(replicas))]}."
        )
    return given
