"""`BatchNorm` of flax.linen, synchronized over the replicas."""

from __future__ import annotations

from typing import final

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen import dtypes

from jaxstrategy._src.flax.statistics import (
    moments,
    normalized,
    refuse_axis_name,
    split_axes,
)
from jaxstrategy._src.values.arrays import Value


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
