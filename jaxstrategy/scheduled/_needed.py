"""The equations that some results need: `needed`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import Literal
from jax.ref import AbstractRef

from jaxstrategy.tracing._jaxpr_types import Atom, Equation, Jaxpr, Var


def needed(
    jaxpr: Jaxpr,
    results: Iterable[Atom],
    keeps_effects: bool,
    operands: Callable[[Equation], Sequence[Atom]],
) -> tuple[list[Equation], set[Var]]:
    """The equations of `jaxpr` that lead to some atoms, and the inputs that these need.

    Written by hand, because JAX has no public function that removes dead equations.

    Args:
      jaxpr: flat.
      results: what is wanted.
      keeps_effects: whether equations stay that do something, too.
      operands: of an equation that is needed, what it needs in turn.
    """
    wanted = {atom for atom in results if not isinstance(atom, Literal)}
    kept: list[Equation] = []
    for eqn in reversed(jaxpr.eqns):
        is_wanted = any(var in wanted for var in eqn.outvars)
        if is_wanted or (keeps_effects and _has_effects(eqn)):
            kept.append(eqn)
            wanted.update(
                atom for atom in operands(eqn) if not isinstance(atom, Literal)
            )
    return kept[::-1], wanted.intersection(jaxpr.invars)


def _has_effects(eqn: Equation) -> bool:
    """Whether it does something besides; the names of axes count as effects to JAX."""
    effects: Any = eqn.effects
    if any(isinstance(atom.aval, AbstractRef) for atom in eqn.invars):
        return True
    return any(not hasattr(effect, "name") for effect in effects)
