"""What is computed a second time, from arrays of which each replica has a part.

The forward pass has gathered them; they are gathered again rather than kept until then.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax import lax
from jax.extend import core
from jax.extend.core import Literal
from jax.ref import AbstractRef

from jaxstrategy.tracing._jaxpr_types import Equation, Var
from jaxstrategy.tracing.division._replica_values import (
    Evaluation,
    ReplicaValues,
)
from jaxstrategy.tracing.replication._jaxprs import closed

_NAMES = ("remat2", "remat", "checkpoint")


def parts_computed_again(eqn: Equation, parts: Mapping[Var, int]) -> dict[int, int]:
    """The operands of `jax.checkpoint` that are gathered for it, with dimensions.

    None of an equation that is something else, or that is no second computation.
    """
    params = eqn.params
    is_again = eqn.primitive.name in _NAMES and params.get("differentiated")
    if not is_again or not params.get("prevent_cse"):
        return {}
    if any(isinstance(atom.aval, AbstractRef) for atom in eqn.invars):
        return {}
    return {
        place: parts[atom]
        for place, atom in enumerate(eqn.invars)
        if not isinstance(atom, Literal) and atom in parts
    }


def computed_again(eqn: Equation, divided: Mapping[int, int]) -> Evaluation:
    """The second computation of something, with gathers of its own.

    Args:
      eqn: of `jax.checkpoint`.
      divided: the operands of which each replica has a part, with their dimensions.
    """
    function = core.jaxpr_as_fun(closed(eqn.params["jaxpr"]))

    def evaluate(values: ReplicaValues) -> None:
        given = [
            values.parts[atom] if place in divided else values.whole(atom)
            for place, atom in enumerate(eqn.invars)
        ]
        # As JAX does for `checkpoint`: or XLA would join this with the first time.
        given = lax.optimization_barrier(given)
        whole = [
            values.collectives.gathered(x, divided[place], eqn.invars[place])
            if place in divided
            else x
            for place, x in enumerate(given)
        ]
        values.keep(eqn.outvars, function(*whole))

    return evaluate
