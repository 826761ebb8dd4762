"""The shards that users give for one variable, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.variables.abstract_variable import AbstractVariable


def checked_shards(given: object, name: str) -> tuple[AbstractVariable, ...]:
    """`given` as the shards of a table.

    Args:
      given: by the user.
      name: of the whole.

    Raises:
      TypeError: not a list of variables, or an empty one.
      ValueError: they are no rows of one table.
    """
    shards = tuple(given) if isinstance(given, Sequence) else ()
    if not shards or not all(isinstance(each, AbstractVariable) for each in shards):
        wrong = [each for each in shards if not isinstance(each, AbstractVariable)]
        which = f", which holds a {type(wrong[0]).__name__}" if wrong else ""
        raise TypeError(
            f"`variables` of ShardedVariable {name!r} was {shown(given)}{which}; a "
            "list of one or more `Variable`s was wanted."
        )
    if len({id(each) for each in shards}) < len(shards):
        raise ValueError(
            f"`variables` of ShardedVariable {name!r} has a variable twice; each row "
            "must be in one shard."
        )
    first = shards[0]
    if not first.shape:
        raise ValueError(
            f"Variable {first.name!r} has no dimensions, and so no rows; shards "
            f"[rows, ...] of ShardedVariable {name!r} were wanted."
        )
    for other in shards[1:]:
        _check_alike(first, other, name)
    return shards


def _check_alike(first: AbstractVariable, other: AbstractVariable, name: str) -> None:
    for what, see in _ALIKE.items():
        mine, others = see(first), see(other)
        if mine != others:
            raise ValueError(
                f"The shards of ShardedVariable {name!r} differ in their {what}: "
                f"{first.name!r} has {mine} and {other.name!r} has {others}. All must "
                "have the same, and only dimension 0 may be of another length."
            )


_ALIKE: dict[str, Any] = {
    "dtype": lambda each: each.dtype.name,
    "number of dimensions": lambda each: each.ndim,
    "shape beyond dimension 0": lambda each: each.shape[1:],
    "strategy": lambda each: each.strategy,
    "synchronization": lambda each: each.synchronization.name,
    "aggregation": lambda each: each.aggregation.name,
}
