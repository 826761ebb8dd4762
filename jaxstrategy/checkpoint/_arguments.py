"""Checks of a manager's arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping

import jax

from jaxstrategy._errors import ContextError
from jaxstrategy.text._shown import shown
from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.values import _arrays, _trees

_STEPS = 2**63  # such numbers are names of files, and of 64 bits elsewhere


def check_host(method: str) -> None:
    """Raise unless code runs outside of steps, eagerly."""
    if _arrays.is_traced():
        raise ContextError(
            f"`{method}` was called inside a step, or inside another function that JAX "
            "compiles, which would do it once, while it is traced. Call it between "
            "steps."
        )


def checked_step(step: object) -> int:
    """`step` as a number of Python."""
    number = whole(step)
    if number is None or not 0 <= number < _STEPS:
        raise ValueError(
            f"`step` was {shown(step)}; a number from 0 to {_STEPS - 1} was wanted."
        )
    return number


def checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Numbers by name."""
    try:
        return {str(name): float(value) for name, value in dict(metrics or {}).items()}
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"`metrics` was {shown(metrics)}; numbers by name were wanted: "
            "`{'accuracy': 0.9}`."
        ) from None


def check_json(extra: object) -> None:
    """Raise unless JSON can say it."""
    try:
        json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"`extra` was {shown(extra)}, which JSON cannot say ({error}). Put "
            "arrays and other values into the state."
        ) from error


def is_function(init: object) -> bool:
    """Whether it makes a state; a model can be both callable and a state."""
    if not callable(init):
        return False
    _trees.object_kinds()
    if _trees.is_object(init):
        return False
    leaves = jax.tree.leaves(init)
    return len(leaves) == 1 and leaves[0] is init
