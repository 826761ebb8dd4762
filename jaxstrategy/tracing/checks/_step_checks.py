"""All checks of a step that are made while it is traced.

Each check names the user's lines; none runs anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jaxstrategy._errors import (
    DoubleReductionWarning,
    NotMirroredError,
    NotMirroredWarning,
)
from jaxstrategy.text import _user_code
from jaxstrategy.text._lists import listed
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.checks._divergences import divergences
from jaxstrategy.tracing.checks._double_reductions import double_reductions
from jaxstrategy.tracing.checks._drifting_variables import drifting_variables
from jaxstrategy.tracing.checks._inner_axes import (
    callbacks_beside_inner_axes,
    constraints_along_replicas,
    narrow_sums_on_some_devices,
)
from jaxstrategy.tracing.checks._local_collectives import local_collectives
from jaxstrategy.tracing.checks._ordered_prints import ordered_prints
from jaxstrategy.tracing.checks._varying_results import (
    broken_promises,
    forgotten_reductions,
)
from jaxstrategy.values._types import PyTree


def check(step: TracedStep, expect_mirrored: PyTree, told: set[type[Warning]]) -> None:
    """Raise if `step` would hang or breaks a promise; warn of what is likely wrong.

    That is a sum of what is reduced already, and state that was mirrored before.

    Args:
      step: what was traced.
      expect_mirrored: see `RunOptions`.
      told: which warnings that are given once were given before; added to.

    Raises:
      ContextError: a collective is in steps that each replica takes by itself.
      NotMirroredVariableError: a mirrored variable is given a varying value.
      DivergentCollectiveError: a varying value decides whether a collective is reached.
      NotMirroredError: a result that should be mirrored is not; state of which each
        replica keeps a part is different on each.
      NotImplementedError: the step calls the host, and its replicas have several
        devices.
      ValueError: `expect_mirrored` does not fit the results; a print is to be ordered,
        on several devices.
    """
    for error in _errors(step):
        raise error
    if broken := list(broken_promises(step, expect_mirrored)):
        error, *others = broken
        if others:
            paths = [other.path or "" for other in others]
            error.add_note(f"The same holds for {listed(paths, 3, '`')}.")
        raise error
    for message, line in double_reductions(step):
        _user_code.warn(message, DoubleReductionWarning, line)
    for path, message, line in forgotten_reductions(step, expect_mirrored):
        if step.trace.replicas.state_sharding is not None:
            # Of a value for each replica none can keep a part.
            raise NotMirroredError(message, path=path, line=line and str(line))
        if NotMirroredWarning not in told:
            told.add(NotMirroredWarning)
            _user_code.warn(message, NotMirroredWarning, line)


def problems(step: TracedStep, expect_mirrored: PyTree) -> Iterator[str]:
    """All that `check` would raise or warn about, in its order."""
    yield from map(str, _errors(step))
    yield from map(str, broken_promises(step, expect_mirrored))
    yield from (message for message, _ in double_reductions(step))
    forgotten = forgotten_reductions(step, expect_mirrored)
    yield from (message for _, message, _ in forgotten)


def _errors(step: TracedStep) -> Iterator[Exception]:
    """What no step may do, whatever was said of its results."""
    return itertools.chain(
        divergences(step),
        local_collectives(step),
        drifting_variables(step),
        callbacks_beside_inner_axes(step),
        constraints_along_replicas(step),
        narrow_sums_on_some_devices(step),
        ordered_prints(step),
    )
