"""One equation as a function, of references or of what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.ref import AbstractRef

from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing.replication._jaxprs import closed, jaxpr_of
from jaxstrategy.values._types import Function, Leaf


def function_of(eqn: Any) -> Function:
    """What an equation computes of its operands."""
    # Each operand is one of its own, or one that is given twice had one derivative.
    invars = [core.Var(atom.aval) for atom in eqn.invars]
    outvars = [core.Var(var.aval) for var in eqn.outvars]
    alone = eqn.replace(invars=list(invars), outvars=list(outvars))
    return core.jaxpr_as_fun(closed(jaxpr_of(invars, [alone], outvars)))


def references(eqn: Equation) -> list[int]:
    """The operands that are references, by place."""
    return [i for i, x in enumerate(eqn.invars) if isinstance(x.aval, AbstractRef)]


def on_contents(function: Function, places: Sequence[int]) -> Function:
    """`function` of what some references hold; it returns what they hold then, last."""

    def called(*operands: Leaf) -> list[jax.Array]:
        own = {place: jax.new_ref(operands[place]) for place in places}
        results = function(*(own.get(i, x) for i, x in enumerate(operands)))
        return [*results, *(own[place][...] for place in places)]

    return called


def with_contents(function: Function, places: Sequence[int]) -> Function:
    """A function of references, of one `on_contents`."""

    def called(*operands: Leaf) -> Sequence[jax.Array]:
        held = [operands[place] for place in places]
        given = [x[...] if i in places else x for i, x in enumerate(operands)]
        results = list(function(*given))
        count = len(results) - len(places)
        for reference, content in zip(held, results[count:], strict=True):
            reference[...] = content
        return results[:count]

    return called
