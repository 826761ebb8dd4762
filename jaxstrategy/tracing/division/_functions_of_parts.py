"""Calls of functions that can be computed from parts, in a trace: `shard_function`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
from jax.extend.core import Literal

from jaxstrategy.reductions import _shard_functions
from jaxstrategy.reductions._shard_functions import ShardFunction
from jaxstrategy.tracing._jaxpr_types import Atom, Equation, Var
from jaxstrategy.tracing.division._replica_values import Evaluation, ReplicaValues


def shard_function(eqn: Equation) -> ShardFunction | None:
    """The function that an equation calls if it can be computed from parts."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    operands = [atom.aval for atom in eqn.invars]
    results = [var.aval for var in eqn.outvars]
    return _shard_functions.called_by(eqn.params["name"], operands, results)


def call_of_parts(
    eqn: Equation, parts: Mapping[Var, int], varies: Callable[[Atom], bool]
) -> ShardFunction | None:
    """The function, if what it takes parts of lies divided along dimension 0."""
    function = shard_function(eqn)
    if function is None or function.of_parts is None:
        return None
    # Parts of what differs between replicas would be parts of several arrays.
    if function.are_rest_equal and any(map(varies, eqn.invars)):
        return None
    operands = [eqn.invars[place] for place in function.divided]
    is_divided = [not isinstance(a, Literal) and parts.get(a) == 0 for a in operands]
    return function if all(is_divided) else None


def evaluation_of_parts(eqn: Equation, function: ShardFunction) -> Evaluation:
    """The evaluation of such a call."""
    of_parts = function.of_parts
    assert of_parts is not None, "the caller has looked"

    def evaluate(values: ReplicaValues) -> None:
        operands = [
            values.parts[atom] if place in function.divided else values.whole(atom)
            for place, atom in enumerate(eqn.invars)
        ]
        results = jax.tree.leaves(of_parts(*operands, axes=values.axes))
        for place, (var, value) in enumerate(zip(eqn.outvars, results, strict=True)):
            if place in function.returns_divided:
                values.parts[var] = value
            else:
                values.keep([var], [value])

    return evaluate
