"""`BatchNorm` of flax.nnx over the examples of all replicas."""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxstrategy._src.flax.statistics import (
    moments,
    normalized,
    refuse_axis_name,
    split_axes,
)
from jaxstrategy._src.values.types import Value


@final
class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` over the global batch.

    Inside `run`, mean and variance are those of all replicas' examples, and so the
    running averages are equal on all replicas. Outside any strategy it is Flax's layer.

    Rows that only fill up a batch of a dataset do not count, where the first dimension
    is still that of the batch.
    With a `mask`, each element that it keeps counts once, whichever replica it is on,
    also when a replica has none. A batch with none at all leaves the running averages
    unchanged and is normalized with them.

    The arguments are those of `flax.nnx.BatchNorm`, except `axis_name`, which is found
    from the context. `axis_index_groups` are groups of replica ids.

    Raises:
      ValueError: an `axis_name` is given.

    >>> import jaxstrategy as js
    >>> from flax import nnx
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> layer = js.flax.nnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
    >>> graph, state = nnx.split(layer)
    >>> @strategy.run
    ... def step(state, x):
    ...     layer = nnx.merge(graph, state)
    ...     layer(x)
    ...     return layer.mean[...], layer.var[...]
    >>> step(state, strategy.per_replica(np.array([[[1.0], [2.0]], [[3.0], [6.0]]])))
    (Array([3.], dtype=float32), Array([3.5], dtype=float32))
    """

    def __init__(
        self, num_features: int, *, axis_name: str | None = None, **arguments: Any
    ) -> None:
        refuse_axis_name(axis_name)
        super().__init__(num_features, **arguments)

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
          use_running_average: whether to use the running averages rather than the
            batch; by default as the layer was made, or last set by `train` or `eval`.
          mask: bools, true where an element counts; of as many dimensions as `x`, each
            of its size or 1; by default, `batch_mask` of the rows of a padded batch.

        Raises:
          ValueError: `mask` does not fit.
        """
        stored = self.use_running_average
        if use_running_average is not None:
            stored = use_running_average
        if stored is None:
            raise ValueError(
                "Neither the layer nor the call says whether to use the running "
                "averages: call `model.train()` or `model.eval()` first, or give "
                "`use_running_average`."
            )
        _, axes = split_axes(jnp.ndim(x), self.axis)
        given = (x, self.mean[...], self.var[...], _of(self.scale), _of(self.bias))
        x, mean, var, scale, bias = self.promote_dtype(given, dtype=self.dtype)
        if not stored:
            mean, var = self._of_batch(x, axes, mask)
        y = normalized(x, mean, var, scale, bias, axes, self.epsilon)
        kept = [array for array in (x, scale, bias) if array is not None]
        return y.astype(self.dtype or jnp.result_type(*kept))

    def _of_batch(
        self, x: jax.Array, axes: tuple[int, ...], mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The batch's moments; they move the running averages."""
        dtype = jnp.promote_types(self.dtype or jnp.result_type(x), jnp.float32)
        batch = moments(
            x.astype(dtype),
            axes,
            mask=mask,
            fast=self.use_fast_variance,
            groups=self.axis_index_groups,
        )
        stored = self.mean[...], self.var[...]
        mean, var = batch.moved(*stored, self.momentum)
        # A variable that holds a reference refuses values that are differentiated.
        self.mean[...] = lax.stop_gradient(mean)
        self.var[...] = lax.stop_gradient(var)
        return batch.or_stored(*stored)


def _of(variable: Any) -> Any:
    return None if variable is None else variable[...]
