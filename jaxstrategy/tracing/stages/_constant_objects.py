"""Objects of Flax NNX that a step reads in a way that cannot be followed.

A generator has them, the cache of a function, a context variable. Their arrays are
constants of its program. So the program is only right as long as they are what they
were, and that is looked at before each of its calls, of all objects that other steps
were given: those are the ones that change.
"""

from __future__ import annotations

import weakref
from typing import final

import jax

from jaxstrategy._errors import RecompilationWarning
from jaxstrategy._options import RunOptions
from jaxstrategy.text import _user_code
from jaxstrategy.tracing._constants import constants
from jaxstrategy.tracing._replica_step import ReplicaStep
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.nnx._adapter import holders_of, structure_of
from jaxstrategy.tracing.stages._stage import Stage
from jaxstrategy.values._trees import is_object
from jaxstrategy.values._types import Leaf


@final
class ConstantObjects(Stage):
    """The objects whose arrays are constants of a program.

    Args:
      step: the step.
      options: not asked.
    """

    def __init__(self, step: ReplicaStep, options: RunOptions) -> None:
        self._name = step.name
        self._variables: list[tuple[Leaf, Leaf]] = []
        self._owners: list[tuple[weakref.ref[object], object]] = []
        self._times = 0

    @property
    def is_active(self) -> bool:
        """Whether a trace so far has such constants."""
        return bool(self._variables)

    def traced(self, step: TracedStep) -> None:
        """Takes note of the constants of a traced step."""
        found = (constant.value for constant in constants(step.trace.closed))
        arrays = {id(value) for value in found if isinstance(value, jax.Array)}
        if not arrays:
            return
        holders = holders_of(arrays)
        self._variables += ((v, v.get_raw_value()) for v, _ in holders)
        owners = {id(owner): owner for _, owner in holders if is_object(owner)}
        self._owners += (
            (weakref.ref(each), structure_of(each)) for each in owners.values()
        )

    def is_outdated(self) -> bool:
        """Whether a constant is not what its object has now; forgets them if so."""
        arrays = all(v.get_raw_value() is array for v, array in self._variables)
        if arrays and all(map(_is_as_it_was, self._owners)):
            return False
        self._variables, self._owners = [], []
        self._times += 1
        # Once can also mean that a constant came from a copy of what has changed.
        if self._times == 2:
            _user_code.warn(
                f"`{self._name}` is compiled again because an object of Flax NNX has "
                "changed that it uses but was not given, and to which no name, "
                "attribute or container leads. Its arrays are constants of the "
                "compiled program. Pass it as an argument.",
                RecompilationWarning,
            )
        return True


def _is_as_it_was(known: tuple[weakref.ref[object], object]) -> bool:
    owner = known[0]()
    return owner is None or structure_of(owner) == known[1]
