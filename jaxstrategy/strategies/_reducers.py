"""Functions of one replica's pytree that reduce and gather, one object for each way."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxstrategy._options import ReduceOp
from jaxstrategy._slices import is_slices
from jaxstrategy._values import PyTree
from jaxstrategy.reductions._all_reduce import Axes, reduced_over
from jaxstrategy.reductions._gather import all_gather


def dimensions(axis: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """The dimensions that `axis` names, None for none.

    Raises:
      TypeError: it is not a whole number, several, or None.
    """
    if axis is None:
        return None
    given = (axis,) if isinstance(axis, int) else axis
    try:
        dimensions = tuple(operator.index(dimension) for dimension in given)
    except TypeError:
        dimensions = None
    if dimensions is None or any(isinstance(dimension, bool) for dimension in given):
        raise TypeError(
            f"`axis` was {axis!r}; None, a whole number or several were wanted."
        )
    return dimensions


def reducer(
    op: ReduceOp,
    axis: tuple[int, ...] | None,
    reduce_leaves: Callable[[ReduceOp, list[Any]], list[Any]],
) -> Callable[[PyTree], PyTree]:
    """Reduces a replica's tree over `axis`, and then over all replicas."""

    def reduce(tree: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_slices)
        if axis is not None:
            leaves = [reduced_over(op, leaf, axis) for leaf in leaves]
        return jax.tree.unflatten(treedef, reduce_leaves(op, leaves))

    return reduce


# One function for each, so that it is compiled once.
@functools.cache
def gatherer(axis: int, axes: Axes) -> Callable[[PyTree], PyTree]:
    """Joins all replicas' trees along `axis`."""

    def gather(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: all_gather(leaf, axis, axes), tree)

    return gather
