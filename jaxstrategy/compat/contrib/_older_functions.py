"""Functions of 2018 over contexts: `increment_var`, `get_loss_reduction`."""

from __future__ import annotations

import jax

from jaxstrategy._errors import ContextError
from jaxstrategy._options import VariableAggregation
from jaxstrategy.compat.contrib._distribution_strategy import DistributionStrategy
from jaxstrategy.compat.contrib._tower_context import get_tower_context
from jaxstrategy.values._types import Value
from jaxstrategy.variables._variable import Variable


def increment_var(v: Variable, amount: Value = 1) -> jax.Array:
    """Adds `amount` to each copy of a variable, once for all towers.

    For counters of steps, in a function of `call_for_each_tower` or outside any scope.

    Args:
      v: the variable.
      amount: a number or an array, equal in all towers.

    Returns:
      The new value, of the shape of `v`.

    Raises:
      ContextError: in cross-tower context; use `distribution_strategy.update` there.
      ValueError: `amount` may differ between towers.
      TypeError: `v` is no variable.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     steps = js.Variable(6)
    ...     strategy.call_for_each_tower(lambda: contrib.increment_var(steps))
    Array(7, dtype=int32)
    """
    context = get_tower_context()
    if context is None:
        raise ContextError(
            "`increment_var` was called in cross-tower context; it is for towers. Use "
            "`distribution_strategy.update(v, lambda v: v.assign_add(amount))` here."
        )

    def merge_fn(strategy: DistributionStrategy, v: Variable) -> jax.Array:
        return strategy.update(v, lambda v: v.assign_add(amount))

    return context.merge_call(merge_fn, v)


def get_loss_reduction() -> VariableAggregation:
    """The aggregation of gradients for the loss at hand: MEAN.

    Nobody records losses here, so that it stays MEAN after a summed one, too, where
    2018 gave SUM.

    >>> from jaxstrategy.compat import contrib
    >>> contrib.get_loss_reduction()
    <VariableAggregation.MEAN: 'MEAN'>
    """
    return VariableAggregation.MEAN
