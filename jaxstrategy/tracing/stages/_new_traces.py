"""Stages that look at each new trace of a step and at nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.checks._step_checks import check
from jaxstrategy.tracing.checks._varying_results import Unstated, unstated
from jaxstrategy.tracing.jaxprs._visit import ArrayType
from jaxstrategy.tracing.stages._stage import Stage
from jaxstrategy.values._types import Function, PyTree


@final
class Checked(Stage):
    """Refuses a step that would hang or breaks a promise.

    Args:
      expect_mirrored: see `RunOptions`.
      told: which warnings that are given once were given before; added to.

    Attributes:
      unstated: results of the last trace of which nobody has said whether they may
        differ, by their place.
    """

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
    """Takes note of how often a step is compiled.

    Args:
      note: called with the function, and the types of its arrays.
    """

    def __init__(self, note: Callable[[Function, Sequence[ArrayType]], None]) -> None:
        self._note = note

    def traced(self, step: TracedStep) -> None:
        """Notes a new trace."""
        self._note(step.replica_step.fn, step.trace.given_types)
