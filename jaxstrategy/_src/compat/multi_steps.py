"""Several steps of one function, an element of an iterator for each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jaxstrategy._src.compat.inputs import require_iterator
from jaxstrategy._src.contexts import replica_context, step_outputs as _step_outputs
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.strategies.current import get_replica_context, get_strategy
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.text.shown import at_least, shown
from jaxstrategy._src.values.arrays import PyTree


class MultiStepContext(_step_outputs.Sender):
    """Named outputs of the last of several steps, set while the steps run.

    Made by `experimental_run_steps_on_iterator`, which passes it to the function first.
    Outside of steps what is set is there at once; what a step of `run` sets is there
    when the step was started.

    >>> from jaxstrategy.compat import v1
    >>> context = v1.MultiStepContext()
    >>> context.last_step_outputs, context.non_tensor_outputs, context.run_op
    ({}, {}, None)
    """

    # How the argument with the operation is written in this generation, and what the
    # different values of the replicas are in.
    _operation_example: ClassVar[str] = "`reduce_op=ReduceOp.MEAN`"
    _several: ClassVar[type[tuple[Any, ...]] | type[list[Any]]] = tuple

    def __init__(self) -> None:
        self._last_step_outputs: dict[str, PyTree] = {}
        self._non_tensor_outputs: dict[str, Any] = {}

    @property
    def last_step_outputs(self) -> dict[str, PyTree]:
        """The outputs by name."""
        return self._read("last_step_outputs", self._last_step_outputs)

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """The outputs that are no arrays, by name."""
        return self._read("non_tensor_outputs", self._non_tensor_outputs)

    @property
    def run_op(self) -> None:
        """The operation that a session would have to run: none."""

    def set_last_step_output(
        self, name: str, output: PyTree, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Sets an output of this step; those of the last one stay."""
        op = None if reduce_op is None else ReduceOp(reduce_op)
        self._set_output(name, output, op)

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Sets an output that is no array."""
        method = self._checked("set_non_tensor_output", name)
        of_replicas = get_replica_context() is not None
        self._post(("other", of_replicas, name, output), method)

    def run_steps(
        self,
        core: Strategy,
        call: Callable[[Any], object],
        iterator: Any,
        iterations: int,
        initial_loop_values: Any,
    ) -> None:
        """Calls a function so many times in cross-replica context with an element."""
        source, count = (
            require_iterator(iterator),
            at_least(0, "iterations", iterations),
        )
        if count == 0:
            self._last_step_outputs.update(_named(initial_loop_values))
        outputs = _step_outputs.StepOutputs(
            self, functools.partial(self._receive, core)
        )

        def loop(_: object) -> None:
            with outputs.opened():
                for _ in range(count):
                    call(source.get_next())

        with core.scope():
            replica = get_replica_context()
            if replica is None:
                loop(None)
            else:  # the default strategy's scope changes nothing
                replica.merge_call(loop)

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
            output = replica.merge_call(lambda s, x: s.reduce(op, x), (output,))
        self._post(("last", False, name, output), method)

    def _checked(self, method: str, name: Any) -> str:
        """The method as the user has called it, if it may be called."""
        called = f"ctx.{method}"
        _step_outputs.require_open(self, called)
        if not isinstance(name, str):
            raise TypeError(
                f"The name of an output was {shown(name)}; a text was wanted."
            )
        return called

    def _post(self, message: tuple[str, bool, str, PyTree], method: str) -> None:
        if _step_outputs.in_step() and get_replica_context() is None:  # in `merge_call`
            message = replica_context.to_replica(message)
        _step_outputs.post(message, method)

    def _receive(self, core: Strategy, message: Any) -> None:
        kind, of_replicas, name, value = message
        if of_replicas:
            value = self._several(core.experimental_local_results(value))
        outputs = (
            self._last_step_outputs if kind == "last" else self._non_tensor_outputs
        )
        outputs[name] = value

    def _read(self, name: str, outputs: dict[str, Any]) -> dict[str, Any]:
        if _step_outputs.in_step():
            raise ContextError(
                f"`ctx.{name}` was read inside a step, which is compiled once, so that "
                "each later step would have the values of now. Read it outside of "
                "`run`, and pass what the step needs as an argument."
            )
        return outputs


def _named(values: Any) -> Mapping[str, Any]:
    if values is None or isinstance(values, Mapping):
        return values or {}
    raise ValueError(
        f"`initial_loop_values` is {shown(values)} and `iterations` is 0, so that "
        "these values are the outputs, but they have no names. Give a dict by name."
    )
