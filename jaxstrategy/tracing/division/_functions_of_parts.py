"""Calls of functions that can be computed from parts, in a trace: `shard_function`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
from jax import lax
from jax.extend.core import Literal

from jaxstrategy.reductions import _shard_functions
from jaxstrategy.reductions._shard_functions import ShardFunction
from jaxstrategy.tracing._jaxpr_types import Atom, Equation, Jaxpr, Var
from jaxstrategy.tracing.division._replica_values import Evaluation, ReplicaValues
from jaxstrategy.tracing.replication._jaxprs import plain

# What stands around a call of such a function, and where it keeps the call.
AROUND_FUNCTIONS = {"custom_jvp_call": "call_jaxpr", "custom_vmap_call": "call"}
_SHAPES = frozenset(("reshape", "transpose", "squeeze", "broadcast_in_dim"))


def shard_function(eqn: Equation) -> ShardFunction | None:
    """The function that an equation calls if it can be computed from parts."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    operands = [atom.aval for atom in eqn.invars]
    results = [var.aval for var in eqn.outvars]
    return _shard_functions.called_by(eqn.params["name"], operands, results)


def is_around_function(jaxpr: Jaxpr) -> bool:
    """Whether nothing is computed but one call of such a function.

    `jax.vmap` may have put changes of shapes around it. A rule for derivatives that is
    given for such a call is that of the call from parts, too. One that a user gives is
    around another rule, ours, and stays.
    """
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name not in _SHAPES]
    if len(eqns) != 1:
        return False
    if eqns[0].primitive.name != "custom_vmap_call":
        return shard_function(eqns[0]) is not None
    inside = plain(eqns[0].params[AROUND_FUNCTIONS["custom_vmap_call"]])
    return len(inside.eqns) == 1 and shard_function(inside.eqns[0]) is not None


def adds_few_rows(eqn: Equation, parts: int) -> bool:
    """Whether an equation adds rows to a table, of which `part_of_sum` is computed.

    It is what JAX makes of the gradient of rows that were taken, if it adds them to
    zeros. Few are those of which all replicas together send less than the table.

    Args:
      eqn: any.
      parts: how many parts tables have.
    """
    if eqn.primitive.name != "scatter-add":
        return False
    table, indices, rows = (atom.aval for atom in eqn.invars)
    numbers, batch = eqn.params["dimension_numbers"], len(indices.shape) - 1
    is_of_rows = (
        tuple(numbers.update_window_dims) == tuple(range(batch, len(rows.shape)))
        and tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and not numbers.operand_batching_dims
        and rows.shape[batch:] == table.shape[1:]
    )
    is_known = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    is_known &= indices.dtype in ("int32", "int64")
    is_few = math.prod(indices.shape) * parts <= table.shape[0]
    return is_of_rows and is_known and is_few


def call_of_parts(
    eqn: Equation, parts: Mapping[Var, int], varies: Callable[[Atom], bool]
) -> ShardFunction | None:
    """The function, if what it takes parts of lies divided along dimension 0."""
    function = shard_function(eqn)
    if function is None:
        return None
    # Parts of what differs between replicas would be parts of several arrays.
    if function.are_rest_equal and any(map(varies, eqn.invars)):
        return None
    operands = [eqn.invars[place] for place in function.divided]
    is_divided = [not isinstance(a, Literal) and parts.get(a) == 0 for a in operands]
    return function if all(is_divided) else None


def evaluation_of_parts(eqn: Equation, function: ShardFunction) -> Evaluation:
    """The evaluation of such a call."""

    def evaluate(values: ReplicaValues) -> None:
        operands = [
            values.parts[atom] if place in function.divided else values.whole(atom)
            for place, atom in enumerate(eqn.invars)
        ]
        results = jax.tree.leaves(
            function.of_parts(*operands, axes=values.collectives.axes)
        )
        for place, (var, value) in enumerate(zip(eqn.outvars, results, strict=True)):
            if place in function.returns_divided:
                values.parts[var] = value
            else:
                values.keep([var], [value])

    return evaluate
