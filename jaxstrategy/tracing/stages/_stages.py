"""All stages that a program may have: a new one is a file, and a line here."""

from __future__ import annotations

from collections.abc import Callable

from jaxstrategy._options import RunOptions
from jaxstrategy.tracing._replica_step import ReplicaStep
from jaxstrategy.tracing.stages._constant_objects import ConstantObjects
from jaxstrategy.tracing.stages._donation import Donation
from jaxstrategy.tracing.stages._finite import finite
from jaxstrategy.tracing.stages._in_flight import InFlight
from jaxstrategy.tracing.stages._mask_arguments import MaskArguments
from jaxstrategy.tracing.stages._stage import Stage

# In this order they look at a call, and at what comes of it.
_STAGES: tuple[Callable[[ReplicaStep, RunOptions], Stage | None], ...] = (
    Donation,
    MaskArguments,
    ConstantObjects,
    InFlight,
    finite,
)


def stages_of(step: ReplicaStep, options: RunOptions) -> list[Stage]:
    """The stages of the program of a step that is compiled with these options.

    Raises:
      ValueError: an option does not fit the arguments.
    """
    made = (make(step, options) for make in _STAGES)
    return [stage for stage in made if stage is not None]
