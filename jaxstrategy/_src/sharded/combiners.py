"""One row of several: their sum or mean, of groups that may differ in length."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from jaxstrategy._src.sharded import table_arguments
from jaxstrategy._src.values.types import Value

Combiner: TypeAlias = Literal["sum", "mean", "sqrtn"]


def check_combiner(
    combiner: str | None, ids: jax.Array, weights: Value | None
) -> jax.Array | None:
    """`weights` as an array like `ids`, None if none were given.

    Raises:
      ValueError: there is no such combiner; `ids` have no dimension of groups; weights
        of another shape than the ids', or without a combiner.
      TypeError: the weights are no real numbers.
    """
    if combiner is not None and combiner not in get_args(Combiner):
        raise ValueError(
            f"`combiner` was {combiner!r}; 'sum', 'mean', 'sqrtn' or None was wanted."
        )
    if combiner is not None and not ids.ndim:
        raise ValueError(
            f"`combiner` was {combiner!r} for one id; ids [..., longest] were wanted, "
            "of which those of the last dimension are a group, filled up with -1."
        )
    if weights is None:
        return None
    if combiner is None:
        raise ValueError(
            "`weights` were given without a `combiner`; 'sum', 'mean' or 'sqrtn' was "
            "wanted."
        )
    found = table_arguments.array("weights", weights)
    if jnp.issubdtype(found.dtype, jnp.complexfloating):
        raise TypeError(f"`weights` are {found.dtype}; real numbers were wanted.")
    if found.shape != ids.shape:
        raise ValueError(
            f"`weights` have shape {found.shape} and `ids` {ids.shape}; one weight "
            "for each id was wanted."
        )
    return found


def combined(
    rows: jax.Array, ids: jax.Array, combiner: str, weights: jax.Array | None
) -> jax.Array:
    """The rows of each group as one.

    Shapes: rows `[..., longest, *features]`, ids `[..., longest]`
    -> `[..., *features]`.
    """
    # Sums of 16 bits lose their last terms.
    kind = jnp.promote_types(rows.dtype, jnp.float32)
    given = jnp.ones(ids.shape, kind) if weights is None else weights.astype(kind)
    each = jnp.where(ids >= 0, given, 0)
    features = rows.ndim - ids.ndim
    total = (rows.astype(kind) * _widened(each, features)).sum(ids.ndim - 1)
    if combiner != "sum":
        total = _quotient(total, _widened(_divisor(each, combiner), features))
    is_whole = combiner == "sum" and weights is None
    is_float = jnp.issubdtype(rows.dtype, jnp.inexact)
    return total.astype(rows.dtype) if is_float or is_whole else total


def _divisor(weights: jax.Array, combiner: str) -> jax.Array:
    """The number that a group's sum is divided by; 0 if it has no ids."""
    if combiner == "mean":
        return weights.sum(-1)
    squares = (weights**2).sum(-1)
    # The derivative of the root of 0 would be infinite.
    is_none = squares == 0
    return jnp.where(is_none, 0, jnp.sqrt(jnp.where(is_none, 1, squares)))


def _quotient(total: jax.Array, divisor: jax.Array) -> jax.Array:
    """`total / divisor`, and zeros for 0: a group without ids."""
    is_none = divisor == 0
    return jnp.where(is_none, 0, total / jnp.where(is_none, 1, divisor))


def _widened(array: jax.Array, dimensions: int) -> jax.Array:
    return array.reshape(array.shape + (1,) * dimensions)
