"""Variables as arguments of a program, which donates their buffers."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
from jax.sharding import NamedSharding

from jaxstrategy._src.errors import PlacementError
from jaxstrategy._src.replicas.replicas import REPLICATED, Replicas
from jaxstrategy._src.tracing.functions.references import weak_method
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.access import Cell
from jaxstrategy._src.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class _Home:
    """The sharding of a variable on other devices, and its name for messages.

    The variable itself is not kept alive.
    """

    sharding: NamedSharding
    description: str


@final
class VariableBuffers:
    """The variables that are arguments of one program; immutable."""

    def __init__(
        self,
        replicas: Replicas,
        local: dict[Cell, NamedSharding] | None = None,
        remote: dict[Cell, _Home] | None = None,
    ) -> None:
        self._replicas = replicas
        self._local = local or {}
        self._remote = remote or {}
        # On all replicas: the first of `values`, which may be donated.
        self.local_cells = list(self._local)
        self.is_empty = not self._local and not self._remote

    @property
    def cells(self) -> list[Cell]:
        """The cells of `values`."""
        return [*self._local, *self._remote]

    @property
    def shardings(self) -> list[NamedSharding]:
        """The shardings of `values`."""
        replicated = [self._replicas.sharding(REPLICATED)] * len(self._remote)
        return [*self._local.values(), *replicated]

    def __contains__(self, variable: Variable) -> bool:
        return variable.cell in self._local or variable.cell in self._remote

    def missing(self, used: Sequence[Variable], traced: bool) -> list[Variable]:
        """The variables among `used` that should be arguments and are not."""

        def by_reference(variable: Variable) -> bool:
            is_local = variable.lives_on(self._replicas)
            return is_local and (traced or variable.cell.is_reference)

        return [v for v in used if v not in self and not by_reference(v)]

    def plus(self, variables: Sequence[Variable]) -> VariableBuffers:
        local, remote = dict(self._local), dict(self._remote)
        for variable in variables:
            if variable.lives_on(self._replicas):
                local[variable.cell] = variable.sharding
            else:
                where = variable.replicas.device_names
                home = _Home(variable.sharding, f"{variable.name!r} lives on {where}")
                remote[variable.cell] = home
        return VariableBuffers(self._replicas, local, remote)

    def without_references(self, traced: bool) -> VariableBuffers:
        """Without variables that became references; without local ones if `traced`."""
        local = {} if traced else self._local
        local = {cell: s for cell, s in local.items() if not cell.is_reference}
        return VariableBuffers(self._replicas, local, self._remote)

    def values(self) -> list[jax.Array]:
        """The arguments for the program."""
        # Written out, because it is done for every variable at every step.
        local = [cell.array for cell in self.local_cells if cell.is_alone]
        if len(local) < len(self.local_cells):
            local = [cell.lend() for cell in self.local_cells]
        if not self._remote:
            return local
        return local + [self._copy_of(*item) for item in self._remote.items()]

    def _copy_of(self, cell: Cell, home: _Home) -> jax.Array:
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
        """Stores the values after a step."""
        for cell, value in zip(self.local_cells, values, strict=False):
            cell.array = value
        remote = values[len(self.local_cells) :]
        for (cell, home), value in zip(self._remote.items(), remote, strict=True):
            first = value.addressable_data(0)
            cell[...] = jax.device_put(first, home.sharding)

    def references(self, values: Sequence[jax.Array]) -> dict[Cell, jax.Ref]:
        """References with these values, for the trace of the program."""
        return dict(zip(self.cells, map(jax.new_ref, values), strict=True))

    def frozen(self, references: Mapping[Cell, jax.Ref]) -> list[jax.Array]:
        """The values of references at the end of the step, with their shardings."""
        arrays = []
        for reference, sharding in zip(
            references.values(), self.shardings, strict=True
        ):
            array = jax.freeze(reference)
            # Along inner axes XLA might shard what is to be replicated.
            if self._replicas.inner_axes or not sharding.is_fully_replicated:
                array = jax.lax.with_sharding_constraint(array, sharding)
            arrays.append(array)
        return arrays


@final
class VariableArguments:
    """The variables that are arguments of a program, after the traces so far.

    References are captured instead: JAX makes variables references where it traces the
    code that calls the step.
    """

    def __init__(self, step: ReplicaStep, recompile: Callable[[], object]) -> None:
        self._step = step
        self._recompile = recompile
        self._used: list[weakref.ref[Any]] = []
        self.buffers = VariableBuffers(step.replicas)
        self.are_used = False
        self.by_reference = False
        self.caller_is_traced = False

    def check_outside(self) -> None:
        """Raises where JAX differentiates with respect to a variable."""
        access.check_outside(used() for used in self._used)

    def traced(self, step: TracedStep, is_traced: bool) -> bool:
        """Adds the variables of a trace; returns whether the arguments changed."""
        used = step.trace.used
        on_death = weak_method(self, VariableArguments._drop_all)
        known = {ref() for ref in self._used}
        watched = (v for v in (*used, *step.results.variables) if v not in known)
        self._used += [weakref.ref(variable, on_death) for variable in watched]
        missing = self.buffers.missing(used, is_traced)
        num_known = sum(variable in self.buffers for variable in used)
        by_reference = num_known + len(missing) < len(used)
        if not missing and by_reference <= self.by_reference:
            return False
        self.are_used = True
        self.by_reference |= by_reference
        self.buffers = self.buffers.plus(missing)
        return True

    def drop_references(self) -> bool:
        """Before a call: drops arguments that are references now; whether any was."""
        self.caller_is_traced = access.is_traced()
        cells = self.buffers.local_cells
        traced = bool(cells) and self.caller_is_traced
        if not traced and not any([cell.array is None for cell in cells]):
            return False
        self.by_reference = True
        self.buffers = self.buffers.without_references(traced)
        return True

    def in_references(self) -> list[tuple[jax.Ref, jax.Array]]:
        """The references that the step may change in place, and their values."""
        used = [variable.cell for ref in self._used if (variable := ref()) is not None]
        return [(cell.ref, cell[...]) for cell in used if cell.is_reference]

    def _drop_all(self, _: object) -> None:
        """Callback of a variable that died: compiles again."""
        if self._step.is_alive:
            self._used, self.by_reference = [], False
            self.buffers = VariableBuffers(self._step.replicas)
            self._recompile()
