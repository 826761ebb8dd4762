"""A program that several processes run together: `AgreedProgram`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from jaxstrategy.tracing._agreed_preparation import AgreedPreparation
from jaxstrategy.tracing._input_layout import InputLayout
from jaxstrategy.tracing._prepared import Obtain
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
        self._leaves: Sequence[Leaf] = ()  # what it is called with now
        self._preparation: AgreedPreparation | None = None  # now

    @property
    def layout(self) -> InputLayout:
        """The form in which the compiled function takes the arguments."""
        return self._program.layout

    def __call__(self, leaves: Sequence[Leaf], inputs: Sequence[PyTree]) -> PyTree:
        """The step's results for these leaves, which are live arrays, as `Program`."""
        return self._agreed(self._program, leaves, inputs)

    def place_and_call(self, leaves: Sequence[Leaf]) -> PyTree:
        """The same, for leaves of any kind and in any place."""
        return self._agreed(self._program.place_and_call, leaves)

    def prepare(self, leaves: Sequence[Leaf], obtain: Obtain) -> None:
        """Has it compiled for arguments of these types, and for no others."""
        self._preparation = self._agreement.preparation(self._name, self._where)
        try:
            self._preparation.run(self._program.prepare, leaves, obtain)
        finally:
            self._preparation = None
        self._is_new = False  # its first call does not compile

    def _agreed(
        self,
        call: Callable[..., PyTree],
        leaves: Sequence[Leaf],
        *more: Sequence[PyTree],
    ) -> PyTree:
        agreement, self._leaves = self._agreement, leaves
        try:
            # In a larger program it is part of what its caller dispatches.
            if _cell.is_traced():
                return call(leaves, *more)
            if agreement.begin(self._name, self._where):
                same = {} if self._is_new else self._step.same(leaves)
                agreement.compare(self._name, self._where, leaves, same)
            if self._is_new:
                agreement.compiles(self._name)
            self._is_dispatched = True
            try:
                results = call(leaves, *more)
            finally:
                self._is_dispatched = False
                agreement.end()
            self._is_new = False
            return results
        finally:
            self._leaves = ()

    def traced(self, step: TracedStep) -> None:
        """Compares a new trace with those of the other processes."""
        closed, dispatched = step.trace.closed, self._is_dispatched
        if self._preparation is not None:
            self._preparation.traced(step.name, closed)
            return
        # Another thread's call may have ended, which has cleared them.
        leaves = self._leaves
        same = self._step.same(leaves) if leaves else {}
        self._agreement.traced(step.name, self._where, closed, same, dispatched)


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
