"""What a program does for a step besides computing it: `Stage`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import final

import jax

from jaxstrategy._src.tracing.checks.step_checks import check
from jaxstrategy._src.tracing.checks.varying_results import Unstated, unstated
from jaxstrategy._src.tracing.jaxprs.visit import ArrayType
from jaxstrategy._src.tracing.trace import Evaluate
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree


class Stage:
    """Hooks around the trace and the calls of a program, in the order of a first call.

    A program calls only those hooks that a stage overrides: others cost nothing.
    """

    donated: frozenset[int] = frozenset()
    needs_whole_jaxpr = False
    needs_lowering = False

    @property
    def kind(self) -> str:
        """Equal for stages that do the same to a program."""
        return type(self).__name__

    def tracing(
        self, leaves: Sequence[Leaf]
    ) -> contextlib.AbstractContextManager[None]:
        """A `with` block for the user's code; `leaves` are one replica's arguments."""
        return contextlib.nullcontext()

    def traced(self, step: TracedStep) -> None:
        """After a trace; may raise."""

    @property
    def is_active(self) -> bool:
        """Whether calls need the hooks below, after the traces so far."""
        return True

    def is_outdated(self) -> bool:
        """Before a call: whether the program must be compiled again."""
        return False

    def before(self, leaves: Sequence[Leaf]) -> None:
        """Before a call; may raise."""

    def instrument(self, step: TracedStep, evaluate: Evaluate) -> Evaluate:
        """In the compiled function: adds one output to those of `evaluate`."""
        return evaluate

    def check(self, output: jax.Array) -> None:
        """After a call, with that output; raises to discard the call's results."""

    def after(self, output: jax.Array) -> None:
        """After a call, with that output."""


def overridden(stages: Sequence[Stage], method: str) -> tuple[Function, ...]:
    """The method of each stage that overrides it."""
    base = getattr(Stage, method)
    return tuple(
        getattr(stage, method)
        for stage in stages
        if getattr(type(stage), method) is not base
    )


@final
class Checked(Stage):
    """Raises for a step that would hang, or whose results vary unexpectedly."""

    def __init__(self, expect_mirrored: PyTree, warned: set[type[Warning]]) -> None:
        self._expected = expect_mirrored
        self._warned = warned
        self.unstated: dict[int, Unstated] = {}

    def traced(self, step: TracedStep) -> None:
        check(step, self._expected, self._warned)
        self.unstated = unstated(step, self._expected)


@final
class Counted(Stage):
    """Counts traces."""

    def __init__(self, count: Callable[[Function, Sequence[ArrayType]], None]) -> None:
        self._count = count

    def traced(self, step: TracedStep) -> None:
        self._count(step.replica_step.fn, step.trace.argument_types)
