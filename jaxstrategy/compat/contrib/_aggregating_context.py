"""`MultiStepContext`, as functions of `run_steps_on_dataset` get it."""

from __future__ import annotations

from typing import Any, final

from jaxstrategy._options import ReduceOp, VariableAggregation
from jaxstrategy.compat._multi_step_context import AbstractMultiStepContext
from jaxstrategy.compat.contrib._cross_tower_checks import operation_of
from jaxstrategy.values._types import PyTree


@final
class MultiStepContext(AbstractMultiStepContext):
    """Named outputs of the last of several steps.

    Made by `run_steps_on_dataset`, which passes it to the function first.

    >>> context = MultiStepContext()
    >>> context.last_step_outputs, context.non_tensor_outputs, context.run_op
    ({}, {}, None)
    """

    _operation_example = "`aggregation=VariableAggregation.MEAN`"

    @classmethod
    def of_steps(cls) -> MultiStepContext:
        """The context that steps are given."""
        return _OF_STEPS

    def set_last_step_output(
        self,
        name: str,
        output: PyTree,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ) -> None:
        """Sets an output of this step; those of the last one stay.

        Args:
          name: of the output.
          output: arrays, or what differs between the towers.
          aggregation: how the towers' values become one, SUM or MEAN; with NONE they
            stay as they are, which a tower cannot ask for.

        Raises:
          ValueError: another aggregation; in a tower, NONE.
          TypeError: `name` is no text.
          ContextError: after the steps have ended, or inside a function that JAX traces
            within a step.
        """
        is_none = aggregation is VariableAggregation.NONE
        op: ReduceOp | None = None if is_none else operation_of(aggregation)
        self._set_output(name, output, op)

    def _several(self, values: tuple[Any, ...]) -> list[Any]:
        """The different values of the towers, a list."""
        return list(values)


_OF_STEPS = MultiStepContext()
