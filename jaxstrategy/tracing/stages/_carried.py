"""The variables that a program is given as arrays, and whose new values it returns.

One that lives on all replicas is lent to the program, with its memory. One that lives
elsewhere (a variable of central storage on its parameter device, an ordinary one on
JAX's default device) is copied to all replicas before the step, and afterwards the
first replica's copy goes back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import final

import jax
from jax.sharding import NamedSharding

from jaxstrategy._errors import PlacementError
from jaxstrategy.replicas._replicas import SAME, Replicas
from jaxstrategy.variables import _cell
from jaxstrategy.variables._cell import AbstractCell
from jaxstrategy.variables._variable import Variable


@dataclasses.dataclass(frozen=True)
class _Home:
    """Where a variable is that lives elsewhere, and what messages say of it.

    A program does not hold the variable itself, which may be dropped before it.
    """

    sharding: NamedSharding
    description: str


@final
class Carried:
    """The variables that one program is given; does not change.

    Args:
      replicas: those of the step.
      here: those that live on all replicas.
      away: the others.
    """

    def __init__(
        self,
        replicas: Replicas,
        here: dict[AbstractCell, NamedSharding] | None = None,
        away: dict[AbstractCell, _Home] | None = None,
    ) -> None:
        self._replicas = replicas
        self._here = here or {}
        self._away = away or {}
        self._cells = list(self._here)
        self.is_empty = not self._here and not self._away

    @property
    def cells(self) -> list[AbstractCell]:
        """Where each of the `values` is kept."""
        return [*self._here, *self._away]

    @property
    def has_lent(self) -> bool:
        """Whether some live on all replicas."""
        return bool(self._cells)

    @property
    def has_references(self) -> bool:
        """Whether some of these have become references."""
        return any([cell.array is None for cell in self._cells])

    @property
    def lent(self) -> range:
        """The places of those `values` that may be overwritten."""
        return range(len(self._cells))

    @property
    def shardings(self) -> list[NamedSharding]:
        """The places of `values` on the devices."""
        everywhere = [self._replicas.sharding(SAME)] * len(self._away)
        return [*self._here.values(), *everywhere]

    def __contains__(self, variable: Variable) -> bool:
        return variable.cell in self._here or variable.cell in self._away

    def missing(self, used: Sequence[Variable], traced: bool) -> list[Variable]:
        """The variables among `used` that should be carried and are not.

        Args:
          used: by the step.
          traced: whether the program is part of a function that JAX traces.
        """

        def by_reference(variable: Variable) -> bool:
            here = variable.lives_on(self._replicas)
            return here and (traced or variable.cell.is_reference)

        return [v for v in used if v not in self and not by_reference(v)]

    def plus(self, variables: Sequence[Variable]) -> Carried:
        """These too."""
        here, away = dict(self._here), dict(self._away)
        for variable in variables:
            if variable.lives_on(self._replicas):
                here[variable.cell] = variable.sharding
            else:
                where = variable.replicas.device_names
                home = _Home(variable.sharding, f"{variable.name!r} lives on {where}")
                away[variable.cell] = home
        return Carried(self._replicas, here, away)

    def without_references(self, traced: bool) -> Carried:
        """Without those that must not be carried any more."""
        here = self._here.items()
        kept = {c: s for c, s in here if not traced and not c.is_reference}
        return Carried(self._replicas, kept, self._away)

    def values(self) -> list[jax.Array]:
        """For the program.

        Raises:
          PlacementError: inside a function traced by JAX.
          IsReference: some must be left out.
        """
        # Written out, because it is done for every variable at every step.
        here = [cell.array for cell in self._cells if cell.is_alone]
        if len(here) < len(self._cells):
            here = [cell.lend() for cell in self._cells]
        if not self._away:
            return here
        return here + [self._fetched(cell, home) for cell, home in self._away.items()]

    def _fetched(self, cell: AbstractCell, home: _Home) -> jax.Array:
        if _cell.is_traced():
            raise PlacementError(
                f"Variable {home.description}, not on all replicas, so a step "
                "that uses it cannot be part of a function that JAX traces "
                "(`jax.jit`, `jax.lax.scan`): it is copied before and after each "
                "step. Call the step outside, or make the variable in the scope of a "
                "MirroredStrategy."
            )
        return jax.device_put(cell[...], self._replicas.sharding(SAME))

    def store(self, values: Sequence[jax.Array]) -> None:
        """Keep what a step made of them."""
        for cell, value in zip(self._cells, values, strict=False):
            cell.array = value
        away = values[len(self._cells) :]
        for (cell, home), value in zip(self._away.items(), away, strict=True):
            first = value.addressable_data(0)
            cell[...] = jax.device_put(first, home.sharding)

    def references(self, values: Sequence[jax.Array]) -> dict[AbstractCell, jax.Ref]:
        """For each a reference that a program works on, while it is traced."""
        refs = map(jax.new_ref, values)
        return dict(zip([*self._here, *self._away], refs, strict=True))

    def kept(self, references: Mapping[AbstractCell, jax.Ref]) -> list[jax.Array]:
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
