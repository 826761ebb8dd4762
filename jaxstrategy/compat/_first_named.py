"""The variable that stands for the place of an optimizer's own state."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstrategy.text._shown import shown
from jaxstrategy.variables._sharded_variable import ShardedVariable
from jaxstrategy.variables._variable import Variable


def first_named(variables: Sequence[Variable], method: str) -> Variable:
    """The variable whose name comes first.

    Args:
      variables: those that an optimizer optimizes.
      method: that was given them, in messages.

    Raises:
      ValueError: there is none.
      TypeError: they are no variables.
    """
    if not isinstance(variables, (list, tuple)) or not all(
        isinstance(variable, (Variable, ShardedVariable)) for variable in variables
    ):
        raise TypeError(
            f"`{method}` was given {shown(variables)}; a list of variables was wanted."
        )
    if not variables:
        raise ValueError(
            f"`{method}` was given no variables; under this strategy the place is that "
            "of the variable whose name comes first."
        )
    return min(variables, key=lambda variable: variable.name)
