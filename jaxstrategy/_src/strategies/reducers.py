"""Functions of one replica's pytree that reduce and gather: `TreeFunctions`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp

from jaxstrategy._src.communication_options import CommunicationOptions
from jaxstrategy._src.masks import filled_rows, step_masks
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.reductions.fingerprint import fingerprints
from jaxstrategy._src.reductions.operations import (
    OPERATIONS,
    checked_axis,
    reduced_over,
    sums,
)
from jaxstrategy._src.reductions.reduction import MetReduction, OwnReduction, Reduction
from jaxstrategy._src.replicas import overflow
from jaxstrategy._src.text.whole_numbers import several_whole, whole
from jaxstrategy._src.values.slices import is_slices
from jaxstrategy._src.values.types import Leaf, PyTree


def dimensions(axis: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """The dimensions that `axis` names, None for none.

    Raises:
      TypeError: it is not a whole number, several, or None.
    """
    if axis is None:
        return None
    one = whole(axis)
    dimensions = several_whole(axis if one is None else (one,))
    if dimensions is None:
        raise TypeError(
            f"`axis` was {axis!r}; None, a whole number or several were wanted."
        )
    return dimensions


class TreeFunctions:
    """One function object for each way to reduce or gather, so that each compiles once.

    Args:
      reduction: how arrays are combined.
    """

    def __init__(self, reduction: Reduction | OwnReduction | MetReduction) -> None:
        self._reduction = reduction
        self._known: dict[Hashable, Callable[[PyTree], PyTree]] = {}

    def reducing(
        self,
        op: ReduceOp,
        axis: tuple[int, ...] | None,
        options: CommunicationOptions | None,
        is_weighted: bool,
        alone: bool = False,
    ) -> Callable[[PyTree], PyTree]:
        """A function that reduces a tree; if it is weighted, a pair of it and weights.

        Args:
          op: what is done with the replicas' versions.
          axis: dimensions of each version over which to reduce, too.
          options: how, instead of as planned.
          is_weighted: see above.
          alone: whether arrays are not joined, unless somebody chose how they are.
        """
        key = op, axis, options, is_weighted, alone
        if key not in self._known:
            reduction = self._reduction.alone() if alone else self._reduction
            leaves = functools.partial(reduction.reduce_leaves, options=options)
            self._known[key] = _reducer(op, axis, is_weighted, leaves)
        return self._known[key]

    def gathering(self, axis: int, in_step: bool) -> Callable[[PyTree], PyTree]:
        """A function that joins all replicas' trees along `axis`.

        Raises:
          TypeError: `axis` is not a whole number.
        """
        # Checked before it is looked up: True is found under 1, and a list is not.
        dimension = checked_axis(axis)
        key = dimension, in_step
        if key not in self._known:
            self._known[key] = _gatherer(dimension, self._reduction.gathered, in_step)
        return self._known[key]

    @functools.cached_property
    def fingerprinting(self) -> Callable[[PyTree], jax.Array]:
        """A function from a tree to its fingerprints, `[replicas, arrays, 2]`."""

        def fingerprints_of(tree: PyTree) -> jax.Array:
            return fingerprints(tree, self._reduction.gathered)

        return fingerprints_of


def _reducer(
    op: ReduceOp,
    axis: tuple[int, ...] | None,
    is_weighted: bool,
    reduce_leaves: Callable[[ReduceOp, list[Leaf]], list[Leaf]],
) -> Callable[[PyTree], PyTree]:
    """Reduces a replica's tree over `axis`, and then over all replicas.

    If it is weighted, the tree is a pair: what is reduced, and the weights.
    """

    def reduce(tree: PyTree) -> PyTree:
        tree, weights = tree if is_weighted else (tree, None)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_slices)
        plain: dict[int, Leaf] = {}
        weighted: dict[int, tuple[jax.Array, jax.Array]] = {}
        for i, leaf in enumerate(leaves):
            own = _weights(leaf, weights, op, axis)
            if own is not None:
                weighted[i] = _sums(leaf, own, axis)
            else:
                plain[i] = leaf if axis is None else reduced_over(op, leaf, axis)
        pairs = [each for pair in weighted.values() for each in pair]
        found = iter(reduce_leaves(ReduceOp.SUM, pairs) if pairs else ())
        results = dict(zip(plain, reduce_leaves(op, list(plain.values())), strict=True))
        for i in weighted:
            total, count = next(found), next(found)
            results[i] = total / count if OPERATIONS[op].divides else total
        return jax.tree.unflatten(treedef, [results[i] for i in range(len(leaves))])

    return reduce


def _weights(
    leaf: Leaf, weights: Leaf, op: ReduceOp, axis: tuple[int, ...] | None
) -> jax.Array | None:
    """The weights of the entries of `leaf`; None if each counts 1.

    Rows of a batch that are not real weigh nothing where rows are reduced.

    Raises:
      ValueError: the weights are not for such a leaf, or not for this reduction.
    """
    is_over_rows = axis is not None and (0 in axis or -jnp.ndim(leaf) in axis)
    if weights is None:
        if not is_over_rows:
            return None
        if OPERATIONS[op].is_sum:
            return step_masks.of_argument(leaf)
        step_masks.not_needed()  # copies of real rows leave extremes as they are
        return None
    if not OPERATIONS[op].is_sum:
        raise ValueError(
            f"`weights` were given for {op.name}, which has none; only {sums()} have."
        )
    given, weights = weights, overflow.array_of(weights)
    shape, wanted = weights.shape, jnp.shape(leaf)
    if shape != wanted[: len(shape)]:
        raise ValueError(
            f"`weights` have shape {shape} on each replica, and a value has {wanted}; "
            "its first dimensions, all or some, were wanted."
        )
    for each in (leaf, given) if is_over_rows else ():
        if (mask := step_masks.of_argument(each)) is not None:
            weights = _of_real_rows(weights, mask)
    return weights


def _of_real_rows(weights: jax.Array, mask: jax.Array) -> jax.Array:
    """`weights`, `[]` or `[rows, ...]`, as 0 in rows that are not real."""
    along = mask.reshape(mask.shape + (1,) * (weights.ndim - 1))
    return jnp.where(along, weights, jnp.zeros((), weights.dtype))


def _sums(
    leaf: Leaf, weights: jax.Array, axis: tuple[int, ...] | None
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum, and that of the weights."""
    leaf = overflow.array_of(leaf)
    along = weights.reshape(weights.shape + (1,) * (leaf.ndim - weights.ndim))
    # What has no weight has no influence, not even NaN.
    kept = jnp.where(along != 0, leaf * along, jnp.zeros((), leaf.dtype))
    along = jnp.broadcast_to(along, leaf.shape)
    if along.dtype == bool:
        along = along.astype(jnp.int32)
    over = () if axis is None else axis
    return (
        reduced_over(ReduceOp.SUM, kept, over),
        reduced_over(ReduceOp.SUM, along, over),
    )


def _gatherer(
    axis: int, gathered: Callable[[Leaf, int], jax.Array], in_step: bool
) -> Callable[[PyTree], PyTree]:
    """Joins all replicas' trees along `axis`.

    Outside a step rows that only fill up a batch are left out afterwards. Inside one
    shapes are static, and they stay.
    """

    def gather(tree: PyTree) -> PyTree:
        leaves = jax.tree.leaves(tree)
        if in_step:
            step_masks.keeps_rows(leaves)
        elif all(filled_rows.is_of_rows(axis, leaf) for leaf in leaves):
            step_masks.not_needed()
        return jax.tree.map(lambda leaf: gathered(leaf, axis), tree)

    return gather
