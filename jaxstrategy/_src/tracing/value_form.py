"""A step in which variables are values: `with_values`.

What reads or writes a reference has to stay where the replicas are. A variable that a
step only reads and overwrites whole, outside of loops and branches, is as good as an
argument and a result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, final

from jax.extend import core
from jax.extend.core import DropVar, Literal, primitives
from jax.ref import AbstractRef

from jaxstrategy._src.tracing.jaxprs.visit import Atom, Equation, Jaxpr, Var, jaxpr_of


@final
@dataclasses.dataclass(frozen=True)
class ValueForm:
    """A step in which some references are values."""

    jaxpr: Jaxpr
    replaced: tuple[int, ...]


def with_values(jaxpr: Jaxpr, candidates: Collection[int]) -> ValueForm:
    """`jaxpr` in which those of some references are values that can be."""
    chosen = [i for i in candidates if _is_simple(jaxpr, jaxpr.invars[i])]
    if not chosen:
        return ValueForm(jaxpr, ())
    fresh: dict[Var, Atom] = {
        jaxpr.invars[i]: core.Var(_content(jaxpr.invars[i])) for i in chosen
    }
    held: dict[Var | None, Atom] = {**fresh}  # what each holds at this point
    names: dict[Var, Atom] = {}
    eqns: list[Equation] = []

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        reference = _first_var(operands)
        if reference not in held:
            eqns.append(_with_operands(eqn, operands))
            continue
        before = held[reference]
        for var in eqn.outvars:
            if not isinstance(var, DropVar):
                names[var] = before
        if eqn.primitive.name == "swap":
            held[reference] = operands[1]
        elif eqn.primitive.name == "addupdate":
            total = core.Var(before.aval)
            eqns.append(_addition(eqn, before, operands[1], total))
            held[reference] = total
    invars = [fresh.get(var, var) for var in jaxpr.invars]
    outvars = [read(atom) for atom in jaxpr.outvars]
    outvars += [held[jaxpr.invars[i]] for i in chosen]
    return ValueForm(jaxpr_of(invars, eqns, outvars), tuple(chosen))


def _first_var(operands: Sequence[Atom]) -> Var | None:
    first = operands[0] if operands else None
    return None if isinstance(first, Literal) else first


def _with_operands(eqn: Any, operands: Sequence[Atom]) -> Equation:
    return eqn.replace(invars=list(operands))


def _content(reference: Var) -> Any:
    return reference.aval.inner_aval


def _is_simple(jaxpr: Jaxpr, reference: Var) -> bool:
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


def _addition(eqn: Any, one: Atom, other: Atom, total: Var) -> Equation:
    return eqn.replace(
        primitive=primitives.add_jaxvals_p,
        params={},
        invars=[one, other],
        outvars=[total],
        effects=frozenset(),
    )
