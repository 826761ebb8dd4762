"""Metrics of Flax NNX over the examples of all replicas."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.masks import masked_means, step_masks
from jaxstrategy._src.strategies.current import get_replica_context
from jaxstrategy._src.values.types import PyTree, Value

# What a metric becomes by an update: from its arrays, and arguments, to its arrays.
Update = Callable[[list[jax.Array], dict[str, Value]], list[jax.Array]]


def update_metrics(
    metrics: nnx.Metric, /, *, mask: Value = None, **values: Value
) -> None:
    """Updates a metric with the examples of all replicas, each of them once.

    `metrics.update(**values)` inside a step knows one replica's examples only, so that
    the metric would differ on each; and it counts the rows that only fill up a batch.
    This joins the examples of all replicas and leaves out the rows that are not real:
    the metric is afterwards what one device has that saw the whole batch.

    Args:
      metrics: an `nnx.MultiMetric`, or any other metric.
      mask: which rows are real, `[rows]`; by default those of the step's batch.
      **values: what `metrics.update` takes. Arrays are of shape `[rows, ...]`, of this
        replica. Numbers, and arrays of shape `[]`, count as the same for each row, and
        must be equal on all replicas: reduce a mean loss first, or better give the
        losses of the rows.

    Raises:
      ValueError: there is no array with rows, or two have other rows; `mask` has
        another shape.
      ContextError: in cross-replica context; in `strategy.local_steps`.

    A batch with filled-up rows, usually the last one of a pass, is gone through row by
    row, which is slower.

    >>> import jaxstrategy as js
    >>> from flax import nnx
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    >>> @strategy.run
    ... def evaluate(metrics, losses):
    ...     js.flax.nnx.update_metrics(metrics, loss=losses)
    >>> for batch in strategy.experimental_distribute_dataset([np.arange(5.0)]):
    ...     evaluate(metrics, batch)
    >>> metrics.compute()
    {'loss': Array(2., dtype=float32)}
    """
    replica = get_replica_context()
    if replica is None:
        raise ContextError(
            "`update_metrics` was called in cross-replica context. It takes one "
            "replica's values: call it inside `run`."
        )
    if context.current().local is not None:
        raise ContextError(
            "`update_metrics` was called in local steps, where each replica is by "
            "itself, but takes the rows of all of them. Return what it was given, and "
            "update the metrics afterwards, in a step of its own. Or return "
            '`all_reduce("sum", masked_sum(...))`, which is summed over all replicas.'
        )
    real = _real_rows(values, mask)
    joined = {k: replica.all_gather(v, 0) for k, v in values.items() if jnp.ndim(v)}
    numbers = {k: v for k, v in values.items() if not jnp.ndim(v)}
    if real is None:
        metrics.update(**joined, **numbers)
    else:
        _update_with(metrics, joined, numbers, replica.all_gather(real, 0))


def _update_with(
    metrics: nnx.Metric, joined: PyTree, numbers: PyTree, real: jax.Array
) -> None:
    """An update with all rows if all are real, and else with those that are."""
    graph, state = nnx.split(metrics)
    arrays, structure = jax.tree.flatten(state)

    def update(arrays: list[jax.Array], values: dict[str, Value]) -> list[jax.Array]:
        metric = nnx.merge(graph, jax.tree.unflatten(structure, arrays))
        metric.update(**values, **numbers)
        new = jax.tree.leaves(nnx.state(metric))
        return [a.astype(old.dtype) for a, old in zip(new, arrays, strict=True)]

    # All replicas have the same rows now, so that they take the same branch.
    arrays = jax.lax.cond(
        real.all(),
        lambda arrays: update(arrays, joined),
        lambda arrays: _row_by_row(update, arrays, joined, real),
        arrays,
    )
    nnx.update(metrics, jax.tree.unflatten(structure, arrays))


def _row_by_row(
    update: Update, arrays: list[jax.Array], values: dict[str, Value], real: jax.Array
) -> list[jax.Array]:
    """The metric after an update with each row that is real.

    Not every metric takes a mask (`Welford` has none), and those that do want one of
    another shape for each argument.
    """

    def turn(arrays: list[jax.Array], row: PyTree) -> tuple[list[jax.Array], None]:
        values, is_real = row
        new = update(arrays, jax.tree.map(lambda v: v[None], values))
        pairs = zip(new, arrays, strict=True)
        return [jnp.where(is_real, after, before) for after, before in pairs], None

    return jax.lax.scan(turn, arrays, (values, real))[0]


def _real_rows(values: dict[str, Value], mask: Value) -> jax.Array | None:
    """The mask of this replica's rows; None where there is none."""
    rows = _rows(values)
    if mask is not None:
        return masked_means.given_rows(mask, rows).mask
    first = next(value for value in values.values() if jnp.ndim(value))
    return masked_means.batch_mask(first) if step_masks.fits(first) else None


def _rows(values: dict[str, Value]) -> int:
    """The number of rows of the arrays."""
    rows = {name: jnp.shape(v)[0] for name, v in values.items() if jnp.ndim(v)}
    if not rows:
        raise ValueError(
            "`update_metrics` was given no array with one entry for each example, so "
            "that it is not known how many there are. Give, for example, the loss of "
            "each example before their mean; or call `metrics.update` with numbers "
            "that are equal on all replicas."
        )
    name, count = next(iter(rows.items()))
    for other, n in rows.items():
        if n != count:
            raise ValueError(
                f"`{other}` has {n} rows, but `{name}` has {count}. All arrays have "
                "one entry for each example of this replica."
            )
    return count
