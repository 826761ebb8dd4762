"""`BatchNorm` of flax.nnx over the examples of all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxstrategy._src import masks
from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.flax.statistics import (
    moments,
    normalized,
    refuse_axis_name,
    split_axes,
)
from jaxstrategy._src.strategies.current import get_replica_context
from jaxstrategy._src.values.arrays import PyTree, Value

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
        return masks.rows_of_mask(mask, rows).mask
    first = next(value for value in values.values() if jnp.ndim(value))
    return masks.batch_mask(first) if masks.current().fits(first) else None


def _rows(values: dict[str, Value]) -> int:
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
