"""Outputs of the last of several steps: `AbstractMultiStepContext`."""

from __future__ import annotations

import functools
from typing import Any

from jaxstrategy._errors import ContextError
from jaxstrategy._options import ReduceOp
from jaxstrategy.contexts import _outbox, _replica_context
from jaxstrategy.contexts._abstract_strategy import AbstractStrategy
from jaxstrategy.strategies._current import get_replica_context, get_strategy
from jaxstrategy.text._shown import shown
from jaxstrategy.values._types import PyTree

# What is done with what a step hands out.
_OUTPUT, _OTHER, _OF_REPLICAS = "output", "other", "other, of each replica"


class AbstractMultiStepContext(_outbox.Sender):
    """Named outputs of the last of several steps, set while the steps run.

    Outside of steps what is set is there at once; what a step of `run` sets is there
    when the step was started.
    """

    def __init__(self) -> None:
        self._last_step_outputs: dict[str, PyTree] = {}
        self._non_tensor_outputs: dict[str, Any] = {}

    @property
    def last_step_outputs(self) -> dict[str, PyTree]:
        """The outputs by name.

        Raises:
          ContextError: inside a step of `run`, which runs on the devices later.
        """
        return self._read("last_step_outputs", self._last_step_outputs)

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """The outputs that are no arrays, by name.

        Raises:
          ContextError: inside a step of `run`.
        """
        return self._read("non_tensor_outputs", self._non_tensor_outputs)

    @property
    def run_op(self) -> None:
        """The operation that a session would have to run: none."""
        return None

    def outbox(self, core: AbstractStrategy) -> _outbox.Outbox:
        """The receiver of the outputs that steps of `core` set."""
        return _outbox.Outbox(self, functools.partial(self._receive, core))

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Sets an output that is no array.

        Args:
          name: of the output; another one of this name is replaced.
          output: set outside of steps, it is what `non_tensor_outputs` has. Set in a
            step, that has all different values of the replicas.

        Raises:
          TypeError: `name` is no text.
          ContextError: after the steps have ended, or inside a function that JAX traces
            within a step.
        """
        method = self._checked("set_non_tensor_output", name)
        kind = _OTHER if get_replica_context() is None else _OF_REPLICAS
        self._post((kind, name, output), method)

    def _set_output(self, name: str, output: PyTree, op: ReduceOp | None) -> None:
        """Sets an output, reduced with `op` over the replicas if there is one."""
        method = self._checked("set_last_step_output", name)
        replica = get_replica_context()
        if replica is None:
            if op is not None:
                output = get_strategy().reduce(op, output)
        elif op is None:
            raise ValueError(
                f"The output {name!r} was set in a replica context without saying how "
                "the replicas' values are reduced. Give "
                f"{self._operation_example}, or return the value from the step and set "
                "the output outside."
            )
        else:
            output = replica.merge_call(_reduced, (op, output))
        self._post((_OUTPUT, name, output), method)

    # How the argument with the operation is written in this generation.
    _operation_example = ""

    def _checked(self, method: str, name: Any) -> str:
        """The method as the user has called it, if it may be called."""
        called = f"ctx.{method}"
        _outbox.require_open(self, called)
        if not isinstance(name, str):
            raise TypeError(
                f"The name of an output was {shown(name)}; a text was wanted."
            )
        return called

    def _post(self, message: tuple[str, str, PyTree], method: str) -> None:
        if _outbox.in_step() and get_replica_context() is None:  # in `merge_call`
            message = _replica_context.to_replica(message)
        _outbox.post(message, method)

    def _receive(self, core: Any, message: tuple[str, str, PyTree]) -> None:
        kind, name, value = message
        if kind == _OUTPUT:
            self._last_step_outputs[name] = value
        elif kind == _OTHER:
            self._non_tensor_outputs[name] = value
        else:
            self._non_tensor_outputs[name] = self._several(
                core.experimental_local_results(value)
            )

    def _several(self, values: tuple[Any, ...]) -> Any:
        """The different values of the replicas, as this generation has them."""
        return values

    def _read(self, name: str, outputs: dict[str, Any]) -> dict[str, Any]:
        if _outbox.in_step():
            raise ContextError(
                f"`ctx.{name}` was read inside a step, which is compiled once, so that "
                "each later step would have the values of now. Read it outside of "
                "`run`, and pass what the step needs as an argument."
            )
        return outputs


def _reduced(strategy: Any, op: ReduceOp, output: PyTree) -> PyTree:
    return strategy.reduce(op, output)
