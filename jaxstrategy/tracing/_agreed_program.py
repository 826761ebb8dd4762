"""A program that several processes run together: `AgreedProgram`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from jaxstrategy.tracing._constants import Given
from jaxstrategy.tracing._program import Program
from jaxstrategy.tracing._replica_step import ReplicaStep
from jaxstrategy.tracing._step_agreement import StepAgreement
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.functions import _code
from jaxstrategy.tracing.stages._stage import Stage
from jaxstrategy.values._types import Leaf, PyTree
from jaxstrategy.variables import _cell


@final
class AgreedProgram(Stage):
    """A program that several processes run together.

    Args:
      step: its step in this one.
      checked: looks at new traces before the other processes learn of them.
      stages: the other stages of the program.
      agreement: with the other processes.
    """

    def __init__(
        self,
        step: ReplicaStep,
        checked: Stage,
        stages: Sequence[Stage],
        agreement: StepAgreement,
    ) -> None:
        self._step = step
        self._program = Program(step, [checked, self, *stages])
        self._agreement = agreement
        self._name = getattr(step.fn, "__qualname__", type(step.fn).__name__)
        place = _code.place_of(step.fn)
        self._where = f"{place[0]}:{place[1]}" if place else "unknown line"
        self._is_new = True
        self._is_dispatched = False  # now, and not part of a larger program
        self._same: dict[int, Given] = {}  # what it is called with now

    def __call__(self, leaves: Sequence[Leaf]) -> PyTree:
        """The step's results for these leaves, which are live arrays."""
        return self._agreed(self._program, leaves)

    def place_and_call(self, leaves: Sequence[Leaf]) -> PyTree:
        """The same, for leaves of any kind and in any place."""
        return self._agreed(self._program.place_and_call, leaves)

    def _agreed(
        self, call: Callable[[Sequence[Leaf]], PyTree], leaves: Sequence[Leaf]
    ) -> PyTree:
        self._same = self._step.same(leaves)
        if _cell.is_traced():  # part of a larger program, which its caller dispatches
            return call(leaves)
        name, where = self._name, self._where
        self._agreement.begin(name, where, leaves, self._same, self._is_new)
        self._is_dispatched = True
        try:
            results = call(leaves)
        finally:
            self._is_dispatched = False
            self._same = {}
            self._agreement.end()
        self._is_new = False
        return results

    def traced(self, step: TracedStep) -> None:
        """Compares a new trace with those of the other processes."""
        closed, dispatched = step.trace.closed, self._is_dispatched
        self._agreement.traced(step.name, self._where, closed, self._same, dispatched)


def program_of(
    step: ReplicaStep,
    checked: Stage,
    stages: Sequence[Stage],
    agreement: StepAgreement | None,
) -> Program | AgreedProgram:
    """The program of `step`, an agreed one if there are other processes.

    Args:
      step: the step in this process.
      checked: looks at new traces first.
      stages: the other stages of the program.
      agreement: with the other processes; None if there are none.
    """
    if agreement is None:
        return Program(step, [checked, *stages])
    return AgreedProgram(step, checked, stages, agreement)
