"""Keras' `BatchNormalization` with the statistics of the global batch, for steps."""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp
import keras

from jaxstrategy._src.flax.statistics import moments
from jaxstrategy._src.strategies.current import get_replica_context


@final
@keras.saving.register_keras_serializable("jaxstrategy")
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` with statistics over all replicas.

    For loops of your own: in a step of `strategy.run`, mean and variance are those of
    the real rows of all replicas (`js.batch_mask`), so that the model trains as on one
    device with the whole batch, and the moving statistics are equal on all. Elsewhere,
    as under `fit`, it is Keras' layer, whose arguments it takes. Keras' own
    `synchronized=True` is for TensorFlow only.

    >>> import keras
    >>> import jaxstrategy as js
    >>> model = keras.Sequential([
    ...     keras.Input((4,)), js.keras.BatchNormalization(), keras.layers.Dense(1)])
    """

    # Keras has no types, and says None of what `build` makes.
    axis: Any
    moving_mean: Any
    moving_variance: Any
    momentum: Any

    def call(self, inputs: jax.Array, training: Any = None, mask: Any = None) -> Any:
        """The inputs, `[rows, ..., features]`, normalized: of the same shape."""
        replica = get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return super().call(inputs, training=training, mask=mask)
        if not training or not self.trainable:
            return super().call(inputs, training=False, mask=mask)
        return self._normalized(inputs, mask)

    def _normalized(self, inputs: jax.Array, mask: jax.Array | None) -> Any:
        x: Any = keras.ops.cast(inputs, "float32")
        axes = tuple(i for i in range(x.ndim) if i != self.axis % x.ndim)
        if mask is not None:
            mask = jnp.expand_dims(mask, range(jnp.ndim(mask), x.ndim))
        # Of differences, because a difference of squares loses digits to a large mean.
        found = moments(x, axes, mask=mask, fast=False, groups=None)
        old = self.moving_mean.value, self.moving_variance.value
        new = found.moved(*old, self.momentum)
        self.moving_mean.assign(new[0])
        self.moving_variance.assign(new[1])
        mean, variance = found.or_stored(*old)
        outputs = keras.ops.batch_normalization(
            x, mean, variance, self.axis, self.beta, self.gamma, self.epsilon
        )
        return keras.ops.cast(outputs, self.compute_dtype)
