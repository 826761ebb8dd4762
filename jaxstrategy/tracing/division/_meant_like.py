"""The arrays that values made outside are to lie like: `meant_like`.

Two weights of one shape may lie along different dimensions. A gradient is to lie as the
results do that are made of it, element by element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import final

from jax.extend.core import Literal

from jaxstrategy.replicas._inner_placement import InnerSpec
from jaxstrategy.tracing._jaxpr_types import Atom, Equation, Jaxpr, Var
from jaxstrategy.tracing.division._cut import Cut
from jaxstrategy.tracing.division._layout import Layout
from jaxstrategy.tracing.replication._jaxprs import closed_jaxprs


@final
@dataclasses.dataclass(frozen=True)
class Along:
    """A division over the replicas and over the devices of each.

    Attributes:
      dimension: that the replicas divide.
      inner: how the devices of a replica divide its part.
    """

    dimension: int
    inner: InnerSpec


def meant_like(jaxpr: Jaxpr, cut: Cut, layout: Layout) -> Mapping[Var, Along]:
    """For values of the shape of results that are made of parts how they lie.

    Args:
      jaxpr: the flat step.
      cut: which of its equations are outside.
      layout: of its results.
    """
    origins = {var: eqn for eqn in cut.outside for var in eqn.outvars}
    found: dict[Var, Along] = {}
    for atom, along in _results(jaxpr, layout):
        pending = [atom]
        while pending:
            var = pending.pop()
            if isinstance(var, Literal) or var in found:
                continue
            found[var] = along
            pending += _alike(var, origins.get(var))
    return found


def _results(jaxpr: Jaxpr, layout: Layout) -> Iterable[tuple[Atom, Along]]:
    """The results that are divided, and then those that are made whole of parts."""
    for dimensions in (layout.outputs, layout.divisible):
        for atom, dimension, inner in zip(
            jaxpr.outvars, dimensions, layout.inside, strict=False
        ):
            if dimension is not None:
                yield atom, Along(dimension, inner)


def _alike(var: Var, eqn: Equation | None) -> list[Atom]:
    """The operands of which a value is made, element by element, by its shape."""
    if eqn is None or any(closed_jaxprs(eqn.params)):
        return []  # which of the operands of a loop or a branch are meant, none says
    return [atom for atom in eqn.invars if atom.aval.shape == var.aval.shape]
