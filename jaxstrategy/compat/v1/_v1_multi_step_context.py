"""`MultiStepContext`, as functions of `experimental_run_steps_on_iterator` get it."""

from __future__ import annotations

from typing import final

from jaxstrategy._options import ReduceOp
from jaxstrategy.compat._multi_step_context import AbstractMultiStepContext
from jaxstrategy.values._types import PyTree


@final
class MultiStepContext(AbstractMultiStepContext):
    """Named outputs of the last of several steps.

    Made by `experimental_run_steps_on_iterator`, which passes it to the function first.

    >>> context = MultiStepContext()
    >>> context.last_step_outputs, context.non_tensor_outputs, context.run_op
    ({}, {}, None)
    """

    _operation_example = "`reduce_op=ReduceOp.MEAN`"

    @classmethod
    def of_steps(cls) -> MultiStepContext:
        """The context that steps are given."""
        return _OF_STEPS

    def set_last_step_output(
        self, name: str, output: PyTree, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Sets an output of this step; those of the last one stay.

        Args:
          name: of the output.
          output: arrays, or what differs between the replicas.
          reduce_op: how the replicas' values become one; without, they stay as they
            are, which a step cannot ask for.

        Raises:
          ValueError: in a step without `reduce_op`.
          TypeError: `name` is no text.
          ContextError: after the steps have ended, or inside a function that JAX traces
            within a step.
        """
        op = None if reduce_op is None else ReduceOp(reduce_op)
        self._set_output(name, output, op)


_OF_STEPS = MultiStepContext()
