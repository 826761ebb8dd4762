"""Mirrored variables whose copies would differ."""

from __future__ import annotations

from collections.abc import Iterator

from jaxstrategy._errors import NotMirroredVariableError
from jaxstrategy.tracing._traced_step import TracedStep


def drifting_variables(step: TracedStep) -> Iterator[NotMirroredVariableError]:
    """One for each mirrored variable that is given something that varies."""
    for name, must_agree, state in step.variables:
        if must_agree and state is not None and state.varies:
            line = step.began(state)
            yield NotMirroredVariableError(
                f"Variable {name!r} is mirrored, but `{step.name}` assigns it a value "
                "that may differ between replicas: its copies would drift apart.\n"
                f"  the value varies since: {step.why(state)}\n"
                "Reduce it first, or make the variable with an `aggregation` "
                "('sum', 'mean', 'only_first_replica'), or with "
                "`synchronization='on_read'` if each replica is to have its own.",
                path=name,
                line=line and str(line),
            )
