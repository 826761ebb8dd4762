"""Mean and variance of a batch that is spread over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy._src import masks
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.strategies.current import (
    get_replica_context,
    get_strategy,
    has_strategy,
)
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import Leaf, PyTree, Value
from jaxstrategy._src.values.per_replica import PerReplica

Groups = Sequence[Sequence[int]] | None


def axis_name() -> str | tuple[str, ...] | None:
    """The name of the replica axis inside `run`, None everywhere else.

    For layers that take an `axis_name` for `jax.lax` collectives, made while the step
    is traced: in a linen `setup` or `@nn.compact` method. A layer that is made outside
    `run` would get None, and would silently not synchronize.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> strategy.run(lambda: js.flax.axis_name()), js.flax.axis_name()
    ('replica', None)
    """
    in_replica = has_strategy() and get_replica_context() is not None
    return get_strategy()._replicas.axis_name if in_replica else None


def average_statistics(statistics: PyTree) -> PyTree:
    """Running statistics of each replica averaged: equal on all replicas, `[...]` each.

    For BatchNorm that is *not* synchronized, before evaluation: each replica's running
    means and variances follow its own part of the data. Inside `run` and outside.

    Args:
      statistics: `batch_stats` of linen, `nnx.state(model, nnx.BatchStat)` of nnx: a
        pytree of arrays inside `run`, of `PerReplica`s outside. Outside, other leaves
        stay as they are.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> js.flax.average_statistics({"mean": strategy.per_replica([1.0, 2.0])})
    {'mean': Array(1.5, dtype=float32)}
    """
    replica = get_replica_context()
    if axis_name() is not None:
        return replica.all_reduce(ReduceOp.MEAN, statistics)

    def average(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, PerReplica):
            return leaf
        # Outside of scopes it is not known whose replicas they are.
        known = has_strategy()
        return get_strategy().reduce("mean", leaf) if known else leaf.stacked.mean(0)

    return trees.map_leaves(average, statistics)


class Moments(NamedTuple):
    """Mean and variance over all replicas, and whether there was anything to count."""

    mean: jax.Array
    variance: jax.Array
    counted: jax.Array | None  # None: always

    def or_stored(self, mean: Value, variance: Value) -> tuple[Value, Value]:
        """These, or the stored ones where nothing was counted."""
        return self._if_counted(self.mean, mean), self._if_counted(
            self.variance, variance
        )

    def moved(
        self, mean: Value, variance: Value, momentum: float
    ) -> tuple[Value, Value]:
        """The stored ones, moved towards these if anything was counted."""

        def move(old: Value, new: Value) -> Value:
            return self._if_counted(momentum * old + (1 - momentum) * new, old)

        return move(mean, self.mean), move(variance, self.variance)

    def _if_counted(self, new: Value, old: Value) -> Value:
        return new if self.counted is None else jnp.where(self.counted, new, old)


def moments(
    x: jax.Array,
    axes: tuple[int, ...],
    *,
    mask: jax.Array | None,
    fast: bool,
    groups: Groups,
) -> Moments:
    """The moments of `x` over `axes` and over the replicas, or this replica's group.

    Each element that `mask` does not leave out counts once, on whichever replica.
    """
    mask = _real_rows(x, axes) if mask is None else mask
    kept = None if mask is None else _spread(mask, x.shape)

    def means(*terms: jax.Array) -> list[jax.Array]:
        if kept is None:
            local = [term.mean(axes) for term in terms]
            return _reduced(ReduceOp.MEAN, local, groups)
        sums = [jnp.where(kept, term, 0).sum(axes) for term in terms]
        sums.append(kept.sum(axes, dtype=jnp.float32))
        *sums, count = _reduced(ReduceOp.SUM, sums, groups)
        at_least_one = jnp.maximum(count, 1)
        return [total / at_least_one.astype(total.dtype) for total in sums] + [count]

    if fast:
        mean, square, *count = means(x, _square(x))
        variance = jnp.maximum(0.0, square - _square(mean))
    else:
        mean, *_ = means(x)
        variance, *count = means(_square(x - jnp.expand_dims(mean, axes)))
    return Moments(mean, variance, count[0] > 0 if count else None)


def _real_rows(x: jax.Array, axes: tuple[int, ...]) -> jax.Array | None:
    """The mask of the step's batch, as one of `x`; None where there is none."""
    known = masks.known_rows(x) if 0 in axes and axis_name() is not None else None
    return None if known is None else known.reshape(-1, *[1] * (x.ndim - 1))


def _spread(mask: Value, shape: tuple[int, ...]) -> jax.Array:
    mask = jnp.asarray(mask, bool)
    if mask.ndim != len(shape) or any(
        have not in (1, want) for have, want in zip(mask.shape, shape, strict=True)
    ):
        raise ValueError(
            f"`mask` has shape {mask.shape}, which does not fit an input of shape "
            f"{shape}: give it as many dimensions, of the same size or 1. For a mask "
            f"of rows: `mask.reshape({(-1, *[1] * (len(shape) - 1))})`."
        )
    return jnp.broadcast_to(mask, shape)


def _reduced(op: ReduceOp, value: PyTree, groups: Groups) -> PyTree:
    if axis_name() is None:
        return value
    return get_replica_context().all_reduce(op, value, groups=groups)


def _square(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return lax.square(x.real) + lax.square(x.imag)
    return lax.square(x)


def normalized(
    x: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    axes: tuple[int, ...],
    epsilon: float,
) -> jax.Array:
    """`(x - mean) / sqrt(variance + epsilon) * scale + bias`, over all axes but `axes`.

    The other arrays have the shape of `x` without `axes`.
    """

    def wide(values: jax.Array) -> jax.Array:
        return jnp.expand_dims(values, axes)

    factor = lax.rsqrt(wide(variance) + epsilon)
    if scale is not None:
        factor = factor * wide(scale)
    y = (x - wide(mean)) * factor
    return y if bias is None else y + wide(bias)


def split_axes(rank: int, axis: int | Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The feature axes of an array, and the others, both in order."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    features = tuple(sorted({a % rank for a in axes}))
    return features, tuple(a for a in range(rank) if a not in features)


def refuse_axis_name(name: str | None) -> None:
    if name is not None:
        raise ValueError(
            f"`axis_name` is {name!r}; this BatchNorm finds the replica axis by "
            "itself. Leave it out, or use Flax's own inside your own `shard_map`."
        )
