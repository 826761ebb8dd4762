"""Several steps of one function, an element of an iterator for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxstrategy.compat._inputs import require_iterator
from jaxstrategy.compat._multi_step_context import AbstractMultiStepContext
from jaxstrategy.strategies._current import get_replica_context
from jaxstrategy.strategies._strategy import Strategy
from jaxstrategy.text._shown import shown
from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.values._types import Value

_C = TypeVar("_C", bound=AbstractMultiStepContext)


def run_steps_on_iterator(
    core: Strategy,
    context: _C,
    call: Callable[[Any], object],
    iterator: Any,
    iterations: int = 1,
    initial_loop_values: Any = None,
) -> _C:
    """Calls a function so many times in cross-replica context, each with an element.

    Args:
      core: the strategy.
      context: what the function sets outputs on.
      call: calls the function with an element.
      iterator: what `make_dataset_iterator` or `make_input_fn_iterator` returned.
      iterations: how many times; 0 leaves `initial_loop_values` as the outputs.
      initial_loop_values: the outputs before the first step, a dict by name. They are
        not needed.

    Returns:
      `context`, with the outputs of the last step.

    Raises:
      OutOfRangeError: there are fewer elements. The steps before have been taken.
      TypeError: `iterator` is none, or `iterations` is no whole number.
      ValueError: `iterations` is negative; or it is 0, and the initial values have no
        names.
    """
    source, count = require_iterator(iterator), _checked(iterations)
    if count == 0:
        context.last_step_outputs.update(_named(initial_loop_values))

    def loop(_: object) -> None:
        with context.outbox(core).opened():
            for _ in range(count):
                call(source.get_next())

    with core.scope():
        replica = get_replica_context()
        if replica is None:
            loop(None)
        else:  # the default strategy's scope changes nothing
            replica.merge_call(loop)
    return context


def _checked(iterations: Value) -> int:
    number = whole(iterations)
    if number is None:
        raise TypeError(f"`iterations` is {shown(iterations)}; it is to be an int.")
    if number < 0:
        raise ValueError(f"`iterations` is {number}; it is to be at least 0.")
    return number


def _named(values: Any) -> Mapping[str, Any]:
    if values is None or isinstance(values, Mapping):
        return values or {}
    raise ValueError(
        f"`initial_loop_values` is {shown(values)} and `iterations` is 0, so that "
        "these values are the outputs, but they have no names. Give a dict by name."
    )
