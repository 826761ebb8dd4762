"""Losses scaled so that the sum over all replicas is that of the global batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxstrategy._src import masks
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.masks import RealRows
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.strategies.current import (
    get_replica_context,
    get_strategy,
    has_strategy,
)
from jaxstrategy._src.text import whole
from jaxstrategy._src.values.arrays import Value
from jaxstrategy._src.values.per_replica import is_per_replica


def compute_average_loss(
    per_example_loss: Value,
    *misplaced: Value,
    sample_weight: Value = None,
    global_batch_size: Value = None,
    mask: Value = None,
) -> jax.Array:
    """This replica's part of the mean loss over the global batch, a scalar.

    The sum of all losses, each times its weight, divided by the *global* batch size.
    The mean over the global batch is the SUM of this over the replicas; so reduce the
    loss and its gradients with "sum", not "mean".

    Args:
      per_example_loss: numbers of shape `[examples, ...]`. 16-bit numbers are summed
        in float32; integers become floats.
      sample_weight: a number, or weights of shape `[examples]`, or of any shape that
        `per_example_loss` begins with. Where a weight is the bool False, a loss does
        not count even if it is not finite (its gradient would be NaN, though: let
        inputs be finite); so `batch_mask(per_example_loss)` is one.
      global_batch_size: examples on all replicas together, a positive integer; may be
        traced. By default the real rows of the batch on all replicas; of losses that
        belong to no batch of a dataset, this replica's times the number of replicas.
      mask: which examples are real, `[examples]`; others do not count. By default
        `batch_mask(per_example_loss)`, which needs no communication, if a batch of the
        step has as many rows. With a mask the replicas sum up their real examples.

    Returns:
      A scalar of the dtype of `per_example_loss`, which the sum of weights does not
      divide.

    Raises:
      ContextError: in cross-replica context without `global_batch_size`.
      ValueError: the loss is a scalar; the weights do not fit; the batch size is not
        one number, or not positive; the mask has another shape.
      TypeError: the batch size is not an integer; more than the loss is given by
        position; something is a `PerReplica`.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
    >>> def step(x):
    ...     loss = js.training.compute_average_loss(x**2)
    ...     return js.get_replica_context().all_reduce("sum", loss)
    >>> (x,) = strategy.experimental_distribute_dataset([np.arange(5.0)])
    >>> strategy.run(step, (x,))  # (0 + 1 + 4 + 9 + 16) / 5: 3 of 8 rows do not count
    Array(6., dtype=float32)
    """
    if misplaced:
        raise TypeError(
            f"`compute_average_loss` was given {1 + len(misplaced)} arguments by "
            "position, where only the loss is taken: a second one could be meant as "
            "the batch size and be read as weights. Write `sample_weight=` or "
            "`global_batch_size=`."
        )
    loss = _numbers(per_example_loss, "per_example_loss")
    if loss.ndim == 0:
        raise ValueError(
            "`per_example_loss` is a scalar; one loss per example is wanted, of shape "
            "[examples, ...]. Leave out the mean over the batch: it is taken here."
        )
    if mask is not None:
        real = masks.rows_of_mask(mask, loss.shape[0])
    else:
        real = masks.current().find(loss) if masks.current().fits(loss) else None
    size = global_batch_size
    if size is None:
        size = _examples(loss, real)
    else:
        _check_size(size)
    # The sum of 16-bit losses may be larger than they can hold; the mean is not.
    precise = jnp.promote_types(loss.dtype, jnp.float32)
    weighted = _weighted(loss.astype(precise), sample_weight)
    if real is not None:
        weighted = _weighted(weighted, real.mask)
    return (weighted.sum() / mesh.array_of(size, precise)).astype(loss.dtype)


def _examples(loss: jax.Array, real: RealRows | None) -> jax.Array | int:
    replicas = _num_replicas("compute_average_loss")
    if real is None:
        _check_size(loss.shape[0] * replicas)
        return loss.shape[0] * replicas
    return replicas / real.share


def scale_regularization_loss(regularization_loss: Value) -> jax.Array:
    """This replica's part of a loss that is the same on all: its sum, divided by N.

    Summed over the N replicas, as losses of `compute_average_loss` are, a
    regularization loss then counts once.

    Args:
      regularization_loss: numbers of any shape, for example one per layer.

    Raises:
      ContextError: in cross-replica context.
      TypeError: it is a `PerReplica`.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
    >>> weights = np.array([1.0, 2.0])
    >>> strategy.run(lambda: js.training.scale_regularization_loss(weights))
    Array(0.75, dtype=float32)
    """
    loss = _numbers(regularization_loss, "regularization_loss")
    return loss.sum() / _num_replicas("scale_regularization_loss")


def _numbers(value: Value, name: str) -> jax.Array:
    if is_per_replica(value):
        raise TypeError(
            f"`{name}` is a PerReplica, which stands for the losses of all replicas. "
            "Call this inside `run`, with one replica's own."
        )
    array = mesh.array_of(value)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    return array.astype(jnp.result_type(float))


def _num_replicas(function: str) -> int:
    if has_strategy() and get_replica_context() is None:
        raise ContextError(
            f"`{function}` was called in cross-replica context, where code sees all "
            "replicas at once. It scales the loss of one replica: call it inside `run`."
        )
    return get_strategy().num_replicas_in_sync


def _check_size(size: Value) -> None:
    array = isinstance(size, (jax.Array, np.ndarray))
    # An array is not read here: it may be traced, or not be computed yet.
    if not (
        jnp.issubdtype(size.dtype, jnp.integer) if array else whole(size) is not None
    ):
        kind = f"of dtype {size.dtype}" if array else repr(size)
        raise TypeError(
            f"`global_batch_size` is {kind}; an integer is wanted. Of a mask of bools "
            "the `sum()` is one."
        )
    if np.shape(size) != ():
        raise ValueError(
            f"`global_batch_size` has shape {np.shape(size)}; one number is wanted."
        )
    if not isinstance(size, Tracer) and size <= 0:
        raise ValueError(
            f"The global batch size is {int(size)}; it must be positive. A batch "
            "without examples has no mean: leave it out."
        )


def _weighted(loss: jax.Array, sample_weight: Value) -> jax.Array:
    if sample_weight is None:
        return loss
    if is_per_replica(sample_weight):
        _numbers(sample_weight, "sample_weight")
    weight = mesh.array_of(sample_weight)
    given = weight.shape
    if weight.ndim == loss.ndim + 1 and given[-1] == 1:
        weight = weight.squeeze(-1)
    weight = weight.reshape(weight.shape + (1,) * (loss.ndim - weight.ndim))
    if weight.ndim != loss.ndim or any(
        have not in (1, want)
        for have, want in zip(weight.shape, loss.shape, strict=True)
    ):
        raise ValueError(
            f"`sample_weight` has shape {given}, which does not fit losses of shape "
            f"{loss.shape}: give one weight per example, shape ({loss.shape[0]},), or "
            "one per loss."
        )
    if weight.dtype == bool:
        return jnp.where(weight, loss, 0)
    return loss * weight.astype(loss.dtype)
