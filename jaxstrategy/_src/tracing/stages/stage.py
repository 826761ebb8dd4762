"""Stages that look at each new trace of a step and at nothing else."""

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
    """One thing that a program does for a step besides computing it.

    A program has a list of stages. Of each it calls what the class of the stage
    overrides, and nothing else, so that a step pays for no stage that is of no use to
    it. The methods stand here in the order of a first call.
    """

    donated: frozenset[int] = frozenset()
    evaluates_all = False
    learns_within = False

    @property
    def kind(self) -> str:
        """What it does, in words that are equal where programs have the same of it."""
        return type(self).__name__

    def tracing(self, own: Sequence[Leaf]) -> contextlib.AbstractContextManager[None]:
        """A `with` block for the step's own code, while it is traced."""
        return contextlib.nullcontext()

    def traced(self, step: TracedStep) -> None:
        """Takes note of a new trace; may raise what is wrong with it."""

    @property
    def is_active(self) -> bool:
        """Whether calls are checked by this stage, after the traces so far."""
        return True

    def is_outdated(self) -> bool:
        """Before a call: whether what was compiled is of no use any more."""
        return False

    def before(self, leaves: Sequence[Leaf]) -> None:
        """Before a call: whether it may be made; raises if not."""

    def within(self, step: TracedStep, evaluate: Evaluate) -> Evaluate:
        """In the compiled function: `evaluate`, with one output more, for `after`."""
        return evaluate

    def check(self, output: jax.Array) -> None:
        """After a call: whether what it has made may be kept."""

    def after(self, output: jax.Array) -> None:
        """After a call: what to do with the output that `within` has added."""


def overridden(stages: Sequence[Stage], method: str) -> tuple[Function, ...]:
    """The method of this name of each stage whose class has one of its own."""
    base = getattr(Stage, method)
    return tuple(
        getattr(stage, method)
        for stage in stages
        if getattr(type(stage), method) is not base
    )


@final
class Checked(Stage):
    """Refuses a step that would hang or breaks a promise."""

    def __init__(self, expect_mirrored: PyTree, told: set[type[Warning]]) -> None:
        self._expected = expect_mirrored
        self._told = told
        self.unstated: dict[int, Unstated] = {}

    def traced(self, step: TracedStep) -> None:
        """Looks at a new trace."""
        check(step, self._expected, self._told)
        self.unstated = unstated(step, self._expected)


@final
class Counted(Stage):
    """Takes note of how often a step is compiled."""

    def __init__(self, note: Callable[[Function, Sequence[ArrayType]], None]) -> None:
        self._note = note

    def traced(self, step: TracedStep) -> None:
        """Notes a new trace."""
        self._note(step.replica_step.fn, step.trace.given_types)
