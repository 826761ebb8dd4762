"""Variables that the program of a step is given as arrays: `VariableArguments`."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
from jax.sharding import NamedSharding

from jaxstrategy._src.errors import PlacementError
from jaxstrategy._src.replicas.replicas import REPLICATED, Replicas
from jaxstrategy._src.tracing.functions import weak_references
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.access import Cell
from jaxstrategy._src.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class _Home:
    """Where a variable is that lives elsewhere, and what messages say of it.

    A program does not hold the variable itself, which may be dropped before it.
    """

    sharding: NamedSharding
    description: str


@final
class VariableBuffers:
    """The variables that one program is given; does not change."""

    def __init__(
        self,
        replicas: Replicas,
        here: dict[Cell, NamedSharding] | None = None,
        away: dict[Cell, _Home] | None = None,
    ) -> None:
        self._replicas = replicas
        self._here = here or {}
        self._away = away or {}
        # Those that live on all replicas: the first `values`, which may be overwritten.
        self.lent = list(self._here)
        self.is_empty = not self._here and not self._away

    @property
    def cells(self) -> list[Cell]:
        """Where each of the `values` is kept."""
        return [*self._here, *self._away]

    @property
    def shardings(self) -> list[NamedSharding]:
        """The places of `values` on the devices."""
        everywhere = [self._replicas.sharding(REPLICATED)] * len(self._away)
        return [*self._here.values(), *everywhere]

    def __contains__(self, variable: Variable) -> bool:
        return variable.cell in self._here or variable.cell in self._away

    def missing(self, used: Sequence[Variable], traced: bool) -> list[Variable]:
        """The variables among `used` that should be carried and are not."""

        def by_reference(variable: Variable) -> bool:
            here = variable.lives_on(self._replicas)
            return here and (traced or variable.cell.is_reference)

        return [v for v in used if v not in self and not by_reference(v)]

    def plus(self, variables: Sequence[Variable]) -> VariableBuffers:
        """These too."""
        here, away = dict(self._here), dict(self._away)
        for variable in variables:
            if variable.lives_on(self._replicas):
                here[variable.cell] = variable.sharding
            else:
                where = variable.replicas.device_names
                home = _Home(variable.sharding, f"{variable.name!r} lives on {where}")
                away[variable.cell] = home
        return VariableBuffers(self._replicas, here, away)

    def without_references(self, traced: bool) -> VariableBuffers:
        """Without those that must not be carried any more."""
        here = self._here.items()
        kept = {c: s for c, s in here if not traced and not c.is_reference}
        return VariableBuffers(self._replicas, kept, self._away)

    def values(self) -> list[jax.Array]:
        """For the program."""
        # Written out, because it is done for every variable at every step.
        here = [cell.array for cell in self.lent if cell.is_alone]
        if len(here) < len(self.lent):
            here = [cell.lend() for cell in self.lent]
        if not self._away:
            return here
        return here + [self._fetched(cell, home) for cell, home in self._away.items()]

    def _fetched(self, cell: Cell, home: _Home) -> jax.Array:
        if access.is_traced():
            raise PlacementError(
                f"Variable {home.description}, not on all replicas, so a step "
                "that uses it cannot be part of a function that JAX traces "
                "(`jax.jit`, `jax.lax.scan`): it is copied before and after each "
                "step. Call the step outside, or make the variable in the scope of a "
                "MirroredStrategy."
            )
        return jax.device_put(cell[...], self._replicas.sharding(REPLICATED))

    def store(self, values: Sequence[jax.Array]) -> None:
        """Keep what a step made of them."""
        for cell, value in zip(self.lent, values, strict=False):
            cell.array = value
        away = values[len(self.lent) :]
        for (cell, home), value in zip(self._away.items(), away, strict=True):
            first = value.addressable_data(0)
            cell[...] = jax.device_put(first, home.sharding)

    def references(self, values: Sequence[jax.Array]) -> dict[Cell, jax.Ref]:
        """For each a reference that a program works on, while it is traced."""
        refs = map(jax.new_ref, values)
        return dict(zip([*self._here, *self._away], refs, strict=True))

    def kept(self, references: Mapping[Cell, jax.Ref]) -> list[jax.Array]:
        """What these hold when the step has ended, where it is kept between steps."""
        places = zip(references.values(), self.shardings, strict=True)
        # Along inner axes XLA might divide what is to be whole.
        is_open = bool(self._replicas.inner_axes)
        return [
            jax.lax.with_sharding_constraint(frozen, where)
            if is_open or not where.is_fully_replicated
            else frozen
            for reference, where in places
            for frozen in [jax.freeze(reference)]
        ]


@final
class VariableArguments:
    """The variables that a program is given, as far as traces have told.

    A step's variables are known when it is traced. Those that JAX may turn into
    references, because it traces the code that calls the step, are not given.
    """

    def __init__(self, step: ReplicaStep, forget: Callable[[], object]) -> None:
        self._step = step
        self._forget = forget
        self._used: list[weakref.ref[Any]] = []
        self.carried = VariableBuffers(step.replicas)
        self.are_used = False
        self.by_reference = False
        self.caller_is_traced = False

    def check_outside(self) -> None:
        """Raises inside a function that is differentiated with respect to one."""
        access.check_outside(used() for used in self._used)

    def traced(self, step: TracedStep, is_traced: bool) -> bool:
        """Takes note of a new trace; returns whether the program must be made anew."""
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
        self.caller_is_traced = access.is_traced()
        lent = self.carried.lent
        traced = bool(lent) and self.caller_is_traced
        if not traced and not any([cell.array is None for cell in lent]):
            return False
        self.by_reference = True
        self.carried = self.carried.without_references(traced)
        return True

    def in_references(self) -> list[tuple[jax.Ref, jax.Array]]:
        """The references that the step changes in place, and what they hold now."""
        used = [variable.cell for ref in self._used if (variable := ref()) is not None]
        return [(cell.ref, cell[...]) for cell in used if cell.is_reference]

    def _watch(self, variables: Sequence[Handle]) -> None:
        """Forgets what was compiled when one of these is gone."""
        gone = weak_references.of(self, VariableArguments._gone)
        watched = {used() for used in self._used}
        self._used += (weakref.ref(v, gone) for v in variables if v not in watched)

    def _gone(self, _: object) -> None:
        if self._step.is_alive:
            self._used, self.by_reference = [], False
            self.carried = VariableBuffers(self._step.replicas)
            self._forget()
