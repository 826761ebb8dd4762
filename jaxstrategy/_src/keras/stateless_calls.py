"""Stateless methods of Keras inside a step: `stateless_call` and the like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from jaxstrategy._src.strategies.current import get_replica_context
from jaxstrategy._src.values.arrays import PyTree

Values: TypeAlias = list[jax.Array]

# Keras names the state of what draws random numbers so, in every layer (3.0 to 3.15).
_SEEDS = "seed_generator"


def stateless_call(
    model: Any,
    trainable_variables: Sequence[jax.Array],
    non_trainable_variables: Sequence[jax.Array],
    *args: PyTree,
    **kwargs: PyTree,
) -> tuple[PyTree, Values]:
    """`model.stateless_call` of one replica: each draws random numbers of its own.

    Keras keeps the state of `Dropout` and other layers that draw among the variables
    that are not trained, equal on all replicas, so that all would drop the same. Here
    each replica draws with its own, made of the common one and its number, and the
    common one counts on.

    Args:
      model: a model or layer of Keras that is built.
      trainable_variables: values for `model.trainable_variables`, in their order.
      non_trainable_variables: values for `model.non_trainable_variables`.
      *args: what the model is called with.
      **kwargs: likewise, such as `training=True`.

    Returns:
      The model's outputs, and the new values of the variables that are not trained.
      These are equal on all replicas, if what layers keep there is reduced, as the
      layer `js.keras.BatchNormalization` does.

    Raises:
      ValueError: there are more or fewer values than variables.

    >>> import keras, numpy as np
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
    >>> @strategy.run
    ... def step(others, x):
    ...     return js.keras.stateless_call(model, [], others, x, training=True)
    >>> others = strategy.mirror([v.value for v in model.non_trainable_variables])
    >>> y, others = step(others, strategy.per_replica(np.ones((2, 4, 2))))
    >>> y.shape
    (4, 2)
    """
    variables = model.non_trainable_variables
    if len(variables) != len(non_trainable_variables):
        raise ValueError(
            f"`stateless_call` was given {len(non_trainable_variables)} values for the "
            f"{len(variables)} variables of `{model.name}` that are not trained. Give "
            "`[v.value for v in model.non_trainable_variables]`, or what an earlier "
            "call returned."
        )
    replica = get_replica_context()
    draws = [_SEEDS in variable.path for variable in variables]
    own = [
        replica.fold_in(value) if is_seed else value
        for value, is_seed in zip(non_trainable_variables, draws, strict=True)
    ]
    outputs, new = model.stateless_call(trainable_variables, own, *args, **kwargs)
    drawn = [
        # How often was drawn is the same on all; what with is not.
        common + replica.all_reduce("max", after - before) if is_seed else after
        for common, before, after, is_seed in zip(
            non_trainable_variables, own, new, draws, strict=True
        )
    ]
    return outputs, drawn


def stateless_update_state(
    metric: Any, metric_variables: Sequence[jax.Array], *args: PyTree, **kwargs: PyTree
) -> Values:
    """`metric.stateless_update_state` with the batches of all replicas.

    For metrics whose variables add up over batches: means, accuracies, `AUC`, counts of
    confusions, and all others of `keras.metrics` that are sums of rows. What each
    replica adds is summed over them.

    Args:
      metric: a metric of Keras that is built.
      metric_variables: values for `metric.variables`, equal on all replicas.
      *args: what `metric.update_state` takes, such as labels and predictions of this
        replica's rows, `[rows, ...]`.
      **kwargs: likewise; with `sample_weight=js.batch_mask(batch)`, rows that only
        fill up a batch do not count.

    Returns:
      The new values, equal on all replicas: for `metric.stateless_result`.

    >>> import keras, numpy as np
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> metric = keras.metrics.Mean()
    >>> @strategy.run
    ... def step(state, x):
    ...     return js.keras.stateless_update_state(metric, state, x)
    >>> state = strategy.mirror([v.value for v in metric.variables])
    >>> state = step(state, strategy.per_replica(np.array([[1.0, 2.0], [3.0, 6.0]])))
    >>> float(metric.stateless_result(state))
    3.0
    """
    before = list(metric_variables)
    after = metric.stateless_update_state(before, *args, **kwargs)
    added = [new - old for new, old in zip(after, before, strict=True)]
    total = get_replica_context().all_reduce("sum", added)
    return [old + more for old, more in zip(before, total, strict=True)]
