"""Replaces references in a jaxpr by inputs and outputs: `with_values`.

Equations with references must stay inside the `shard_map`. A variable that a step only
reads and overwrites whole, outside of loops and branches, can be an argument and a
result instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, final

from jax.extend import core
from jax.extend.core import DropVar, Literal, primitives
from jax.ref import AbstractRef

from jaxstrategy._src.tracing.jaxprs import Atom, Equation, Jaxpr, Var, jaxpr_of


@final
@dataclasses.dataclass(frozen=True)
class ValueForm:
    """A jaxpr with values for the references `replaced`, and outputs for them last."""

    jaxpr: Jaxpr
    replaced: tuple[int, ...]


def with_values(jaxpr: Jaxpr, candidates: Collection[int]) -> ValueForm:
    """Replaces those references among the inputs `candidates` that can be replaced."""
    chosen = [i for i in candidates if _is_replaceable(jaxpr, jaxpr.invars[i])]
    if not chosen:
        return ValueForm(jaxpr, ())
    whole: Any = jaxpr  # JAX's own types of equations are not exported
    inputs: Sequence[Var] = whole.invars
    fresh: dict[Var, Atom] = {
        inputs[i]: core.Var(inputs[i].aval.inner_aval) for i in chosen
    }
    contents: dict[Atom | None, Atom] = {**fresh}  # at this point
    names: dict[Var, Atom] = {}
    eqns: list[Equation] = []

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    for eqn in whole.eqns:
        operands = [read(atom) for atom in eqn.invars]
        reference = operands[0] if operands else None
        if isinstance(reference, Literal) or reference not in contents:
            eqns.append(eqn.replace(invars=operands))
            continue
        before = contents[reference]
        for var in eqn.outvars:
            if not isinstance(var, DropVar):
                names[var] = before
        if eqn.primitive.name == "swap":
            contents[reference] = operands[1]
        elif eqn.primitive.name == "addupdate":
            total = core.Var(before.aval)
            addition = eqn.replace(
                primitive=primitives.add_jaxvals_p,
                params={},
                invars=[before, operands[1]],
                outvars=[total],
                effects=frozenset(),
            )
            eqns.append(addition)
            contents[reference] = total
    invars = [fresh.get(var, var) for var in inputs]
    outvars = [read(atom) for atom in jaxpr.outvars]
    outvars += [contents[inputs[i]] for i in chosen]
    return ValueForm(jaxpr_of(invars, eqns, outvars), tuple(chosen))


def _is_replaceable(jaxpr: Jaxpr, reference: Var) -> bool:
    """Whether a reference is only read and written whole, at the top level."""
    if not isinstance(reference.aval, AbstractRef):
        return False
    if any(atom is reference for atom in jaxpr.outvars):
        return False
    return all(
        _is_whole_access(eqn, reference)
        for eqn in jaxpr.eqns
        if any(atom is reference for atom in eqn.invars)
    )


def _is_whole_access(eqn: Equation, reference: Var) -> bool:
    operands = {"get": 1, "swap": 2, "addupdate": 2}.get(eqn.primitive.name)
    if operands != len(eqn.invars) or eqn.invars[0] is not reference:
        return False  # an index that is computed, or no access at all
    shape = reference.aval.shape
    values = [*eqn.invars[1:], *eqn.outvars]
    return all(tuple(value.aval.shape) == tuple(shape) for value in values)
