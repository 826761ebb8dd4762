"""Sums and means over the real rows of a batch, inside a step."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.masks import step_masks
from jaxstrategy._src.masks.step_masks import RealRows
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.replicas import overflow
from jaxstrategy._src.values.types import Value


def batch_mask(array: jax.Array) -> jax.Array:
    """A mask of the rows of `array` that are real examples; for use inside a step.

    A batch that does not divide over the replicas is filled up with copies of its last
    row. Its mask goes into the step with it, and this is how to ask for it.

    The arrays of a batch share one mask. After a function of your own under `jax.jit`
    has returned them, each has one of its own, equal or not: then ask with an argument
    of the step, not with something computed from two.

    Args:
      array: of shape `[rows, ...]`: an argument of the step, or computed from one row
        by row.

    Returns:
      Booleans of shape `[rows]`. All are true for arrays that come from no dataset.

    Raises:
      ValueError: `array` is a scalar; no batch of the step has as many rows; or, when
        the step is called, two different batches have.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> (batch,) = strategy.experimental_distribute_dataset([np.arange(3)])
    >>> strategy.run(js.batch_mask, (batch,)).values
    (Array([ True,  True], dtype=bool), Array([ True, False], dtype=bool))
    """
    rows = _rows(array, "batch_mask")
    known = step_masks.real_rows(array)
    return jnp.ones(rows, bool) if known is None else known.mask


def masked_sum(
    values: jax.Array, *, mask: jax.Array | None = None, axis: int | None = 0
) -> jax.Array:
    """The sum of `values` over the real rows of this replica.

    Its sum over the replicas is that over all real rows of the batch.

    Args:
      values: of shape `[rows, ...]`. What rows that are not real hold has no influence,
        not even NaN.
      mask: which rows are real, `[rows]`; by default `batch_mask(values)`. With more
        dimensions, `[rows, time]`, which entries count: those of real rows do.
      axis: 0 sums over the rows, None over all dimensions. Those of `mask` are always
        summed over.

    Returns:
      An array of shape `[...]`, or a scalar; 0 on a replica without real rows. Booleans
      are counted.

    Raises:
      ValueError: as `batch_mask` does; or `mask` or `axis` does not fit.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
    >>> (batch,) = strategy.experimental_distribute_dataset([np.arange(5.0)])
    >>> strategy.reduce("sum", strategy.run(js.masked_sum, (batch,)))
    Array(10., dtype=float32)
    """
    _rows(values, "masked_sum")
    mask = batch_mask(values) if mask is None else _given(mask, values)
    return jnp.sum(
        _kept(values, mask), axis=_summed_over(axis, mask, values, "masked_sum")
    )


def masked_mean(
    values: jax.Array, *, mask: jax.Array | None = None, axis: int | None = 0
) -> jax.Array:
    """This replica's share in the mean of `values` over the real rows of the batch.

    The mean of the shares over the replicas is the mean over all real rows, exactly,
    and so for gradients: reduce both with `"mean"`. A share is the mean over the
    replica's own rows, weighted with their number; where all rows are real, it is their
    mean.

    Args:
      values: of shape `[rows, ...]`, such as the loss of each example. What rows that
        are not real hold has no influence, not even NaN.
      mask: which rows are real, `[rows]`; by default `batch_mask(values)`, which needs
        no communication. With a mask the replicas sum up their numbers of real rows.
        With more dimensions, `[rows, time]`, it says which entries count, of real rows,
        and each of them counts alike.
      axis: 0 is the mean over the rows, of shape `[...]`: losses `[rows, time]` have
        one mean for each time. None is the mean over all entries, a scalar. The
        dimensions of `mask` are always averaged over.

    Returns:
      An array of shape `[...]`, or a scalar; 0 on a replica without real rows.

    Raises:
      ValueError: as `batch_mask` does; or `mask` or `axis` does not fit.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
    >>> (batch,) = strategy.experimental_distribute_dataset([np.arange(5.0)])
    >>> shares = strategy.run(js.masked_mean, (batch,))
    >>> shares.values[0], shares.values[3]  # of 0 and 1; and of no rows
    (Array(0.8, dtype=float32), Array(0., dtype=float32))
    >>> strategy.reduce("mean", shares)
    Array(2., dtype=float32)
    """
    rows = _rows(values, "masked_mean")
    if mask is None:
        real = step_masks.real_rows(values)
    else:
        given = _given(mask, values)
        real = RealRows(given, _share(given))
    if real is None and rows:
        every = jnp.ones(rows, bool)
        over = _summed_over(axis, every, values, "masked_mean")
        return jnp.mean(overflow.array_of(values), over)
    if real is None:  # NumPy's mean of nothing is NaN
        real = RealRows(jnp.ones(0, bool), jnp.ones(()))
    over = _summed_over(axis, real.mask, values, "masked_mean")
    total = jnp.sum(_kept(values, real.mask), axis=over)
    others = math.prod(np.shape(values)[real.mask.ndim : len(over)])
    share = real.share if others == 1 else real.share / others
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total * share
    return total * share.astype(jnp.finfo(total.dtype).dtype)


def given_rows(mask: Value, rows: int) -> RealRows:
    """The real rows by a user's mask; the replicas sum up their numbers."""
    checked = _checked(mask, (rows,))
    return RealRows(checked, _share(checked))


def _given(mask: Value, values: Value) -> jax.Array:
    """`mask` of rows of `values`, or of their entries: those of real rows."""
    mask = _checked(mask, np.shape(values))
    if mask.ndim > 1 and (known := step_masks.real_rows(values)) is not None:
        mask &= known.mask.reshape(-1, *[1] * (mask.ndim - 1))
    return mask


def _summed_over(
    axis: int | None, mask: jax.Array, values: Value, name: str
) -> tuple[int, ...]:
    """The first dimensions of `values`: those of `mask`, or all."""
    if axis is None:
        return tuple(range(np.ndim(values)))
    if isinstance(axis, bool) or axis != 0:
        raise ValueError(
            f"`axis` of `{name}` was {axis!r}; 0 for the rows or None for all "
            "dimensions was wanted. For others take the mean over these first."
        )
    return tuple(range(mask.ndim))


def _share(mask: jax.Array) -> jax.Array:
    """The factor of a sum over `mask`, from the masks of all replicas."""
    real = jnp.sum(mask).astype(jnp.float32)
    replica = context.current().replica
    if not isinstance(replica, ReplicaContext):
        return 1 / jnp.maximum(real, 1)
    total = replica.all_reduce(ReduceOp.SUM, real)
    return replica.num_replicas_in_sync / jnp.maximum(total, 1)


def _kept(values: Value, mask: jax.Array) -> jax.Array:
    values = overflow.array_of(values)
    along = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    return jnp.where(along, values, jnp.zeros((), values.dtype))


def _rows(values: Value, name: str) -> int:
    if np.ndim(values) == 0:
        raise ValueError(
            f"`{name}` was given a scalar; an array with one entry for each row of the "
            "batch was wanted, such as the loss of each example before their mean."
        )
    return np.shape(values)[0]


def _checked(mask: Value, wanted: tuple[int, ...]) -> jax.Array:
    """`mask` as Booleans."""
    shape, rows = np.shape(mask), wanted[0]
    if not shape or shape != wanted[: len(shape)]:
        entries = ""
        if len(wanted) > 1:
            entries = f" One of entries has the first dimensions of values {wanted}."
        raise ValueError(
            f"`mask` has shape {shape}; one entry for each of the {rows} rows was "
            f"wanted.{entries}"
        )
    return overflow.array_of(mask).astype(bool)
