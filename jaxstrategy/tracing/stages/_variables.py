"""Variables that the program of a step is given as arrays: `VariableArguments`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from jaxstrategy.tracing._replica_step import ReplicaStep
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.functions import _callbacks
from jaxstrategy.tracing.stages._carried import Carried
from jaxstrategy.values._handle import Handle
from jaxstrategy.variables import _cell, _given_values


@final
class VariableArguments:
    """The variables that a program is given, as far as traces have told.

    A step's variables are known when it is traced. Those that JAX may turn into
    references, because it traces the code that calls the step, are not given.

    Args:
      step: the step.
      forget: called when a variable is gone, and with it what was compiled.

    Attributes:
      carried: those that the program is given.
      are_used: whether the step uses any.
      by_reference: whether the program reaches some by references.
      caller_is_traced: whether JAX traces the code of the last call that uses them.
    """

    def __init__(self, step: ReplicaStep, forget: Callable[[], object]) -> None:
        self._step = step
        self._forget = forget
        self._used: list[weakref.ref[Any]] = []
        self.carried = Carried(step.replicas)
        self.are_used = False
        self.by_reference = False
        self.caller_is_traced = False

    def check_outside(self) -> None:
        """Raises inside a function that is differentiated with respect to one.

        Raises:
          ContextError: the call is there.
        """
        _given_values.check_outside(used() for used in self._used)

    def traced(self, step: TracedStep, is_traced: bool) -> bool:
        """Takes note of a new trace; returns whether the program must be made anew.

        Args:
          step: what was traced.
          is_traced: whether JAX traces the code that calls the step.
        """
        used = step.trace.used
        self._watch([*used, *step.results.variables])
        missing = self.carried.missing(used, is_traced)
        carried_now = sum(variable in self.carried for variable in used)
        by_reference = carried_now + len(missing) < len(used)
        if not missing and by_reference <= self.by_reference:
            return False
        self.are_used = True
        self.by_reference |= by_reference
        self.carried = self.carried.plus(missing)
        return True

    def settle(self) -> bool:
        """Before a call: leaves out what is a reference now; whether there was any."""
        self.caller_is_traced = _cell.is_traced()
        traced = self.carried.has_lent and self.caller_is_traced
        if not traced and not self.carried.has_references:
            return False
        self.by_reference = True
        self.carried = self.carried.without_references(traced)
        return True

    def in_references(self) -> list[tuple[jax.Ref, jax.Array]]:
        """The references that the step changes in place, and what they hold now."""
        used = [variable.cell for ref in self._used if (variable := ref()) is not None]
        return [(cell.ref, cell[...]) for cell in used if cell.is_reference]

    def _watch(self, variables: Sequence[Handle]) -> None:
        """Forgets what was compiled when one of these is gone.

        The function uses another one now, if it is called at all: an attribute or a
        global name that was given a new variable. And the memory is free.
        """
        gone = _callbacks.of(self, VariableArguments._gone)
        watched = {used() for used in self._used}
        self._used += (weakref.ref(v, gone) for v in variables if v not in watched)

    def _gone(self, _: object) -> None:
        if self._step.is_alive:
            self._used, self.by_reference = [], False
            self.carried = Carried(self._step.replicas)
            self._forget()
