"""Functions of one replica's pytree that reduce and gather, one object for each way."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import jax

from jaxstrategy._options import ReduceOp
from jaxstrategy._values import PyTree
from jaxstrategy.reductions._all_reduce import Axes, reduce_axis
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


# One function for each way to reduce, so that each is compiled once.
@functools.cache
def reducer(
    op: ReduceOp, axis: tuple[int, ...] | None, axes: Axes
) -> Callable[[PyTree], PyTree]:
    def reduce(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: reduce_axis(op, leaf, axis, axes), tree)

    return reduce


@functools.cache
def gatherer(axis: int, axes: Axes) -> Callable[[PyTree], PyTree]:
    def gather(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: all_gather(leaf, axis, axes), tree)

    return gather


# One function for each strategy's axes, so that it is compiled once.
