"""`BatchNorm` of flax.linen, and statistics of a batch spread over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen import dtypes
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


@final
class BatchNorm(linen.BatchNorm):
    """`flax.linen.BatchNorm` over the global batch.

    Inside `run`, mean and variance are those of all replicas' examples, and so the
    running averages in `batch_stats` are equal on all replicas. `model.init`,
    `strategy.init` and calls outside any strategy need nothing more. Parameters,
    `batch_stats` and automatic names are those of Flax's layer.

    Rows that only fill up a batch of a dataset do not count, where the first dimension
    is still that of the batch.
    With a `mask`, each element that it keeps counts once, whichever replica it is on,
    also when a replica has none. A batch with none at all leaves the running averages
    unchanged and is normalized with them. (Flax's layer with an `axis_name` averages
    the replicas' means, whatever they are means of.)

    The attributes are those of `flax.linen.BatchNorm`, except `axis_name`, which is
    found from the context. `axis_index_groups` are groups of replica ids.

    Raises:
      ValueError: an `axis_name` is given.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> layer = js.flax.linen.BatchNorm(use_running_average=False, momentum=0.0)
    >>> x = np.array([[1.0], [2.0], [3.0], [6.0]], np.float32)
    >>> variables = layer.init(jax.random.key(0), x)
    >>> @strategy.run
    ... def step(variables, x):
    ...     _, updated = layer.apply(variables, x, mutable="batch_stats")
    ...     return updated["batch_stats"]
    >>> step(variables, strategy.per_replica(x.reshape(2, 2, 1)))
    {'mean': Array([3.], dtype=float32), 'var': Array([3.5], dtype=float32)}
    """

    def __post_init__(self) -> None:
        refuse_axis_name(self.axis_name)
        super().__post_init__()

    @linen.compact
    def __call__(
        self,
        x: Value,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """`x` normalized, in its own shape.

        Args:
          x: an array.
          use_running_average: whether to use `batch_stats` rather than the batch.
          mask: bools, true where an element counts; of as many dimensions as `x`, each
            of its size or 1; by default, `batch_mask` of the rows of a padded batch.

        Raises:
          ValueError: `mask` does not fit.
        """
        stored = linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        features, axes = split_axes(jnp.ndim(x), self.axis)
        shape = [x.shape[axis] for axis in features]
        exact = jnp.float32 if self.force_float32_reductions else self.param_dtype
        old_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, exact)
        old_var = self.variable("batch_stats", "var", jnp.ones, shape, exact)
        mean, var = old_mean.value, old_var.value
        if stored and not self.force_float32_reductions:
            mean, var = mean.astype(exact), var.astype(exact)
        if not stored:
            mean, var = self._of_batch(x, axes, mask, old_mean, old_var)
        scale = self._parameter("scale", self.scale_init, shape, self.use_scale)
        bias = self._parameter("bias", self.bias_init, shape, self.use_bias)
        given = [array for array in (x, scale, bias) if array is not None]
        dtype = dtypes.canonicalize_dtype(*given, dtype=self.dtype)
        y = normalized(jnp.asarray(x), mean, var, scale, bias, axes, self.epsilon)
        return y.astype(dtype)

    def _of_batch(
        self,
        x: Value,
        axes: tuple[int, ...],
        mask: jax.Array | None,
        old_mean: linen.Variable,
        old_var: linen.Variable,
    ) -> tuple[jax.Array, jax.Array]:
        dtype = self.dtype or jnp.result_type(x)
        if self.force_float32_reductions:
            dtype = jnp.promote_types(dtype, jnp.float32)
        batch = moments(
            jnp.asarray(x, dtype),
            axes,
            mask=mask,
            fast=self.use_fast_variance,
            groups=self.axis_index_groups,
        )
        stored = old_mean.value, old_var.value
        if not self.is_initializing():
            old_mean.value, old_var.value = batch.moved(*stored, self.momentum)
        return batch.or_stored(*stored)

    def _parameter(
        self, name: str, start: Value, shape: list[int], used: bool
    ) -> jax.Array | None:
        if not used:
            return None
        value = self.param(name, start, shape, self.param_dtype)
        if self.force_float32_reductions:
            return value
        return jnp.asarray(value, self.param_dtype)
