"""The collectives of a single replica of several devices: `without_collectives`.

XLA cannot compile an all-reduce over an axis of size 1 beside inner axes along which
its operand is divided ("Cross-partition allreduce must be in (partial) manual
partitioning mode", JAX 0.10 and 0.12). Nothing has to be sent, so there need be none.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy.tracing.jaxprs._collectives import Effect, effect_of, names
from jaxstrategy.tracing.jaxprs._rewrite import rewritten_function
from jaxstrategy.tracing.jaxprs._visit import Equation
from jaxstrategy.values._types import Function

_SENDS_ITS_OWN = (
    Effect.SUM,
    Effect.EXTREME,
    Effect.GATHER,
    Effect.BROADCAST,
    Effect.PERMUTE,
    Effect.SUM_SCATTER,
)


def without_collectives(fn: Function, axes: Sequence[str]) -> Function:
    """`fn` of the only replica, without its collectives along the replicas' axes."""
    return rewritten_function(fn, lambda eqn: _alone(eqn, set(axes)))


def _alone(eqn: Equation, axes: set[str]) -> Function | None:
    """The function that takes the place of a collective; None: the equation stays.

    It makes copies, because in a jaxpr results are neither operands nor literals.
    """
    if not names(eqn) or not axes.issuperset(names(eqn)):
        return None
    if eqn.primitive.name == "axis_index":
        return lambda: [jnp.copy(jnp.zeros((), eqn.outvars[0].aval.dtype))]
    is_exchange = eqn.primitive.name == "all_to_all"
    if effect_of(eqn) not in _SENDS_ITS_OWN and not is_exchange:
        return None
    is_sent = eqn.params.get("perm") != ()

    def own(*arrays: jax.Array) -> list[jax.Array]:
        types = [var.aval for var in eqn.outvars]
        if not is_sent:
            return [jnp.copy(jnp.zeros(each.shape, each.dtype)) for each in types]
        # At most a dimension of size 1 comes, goes or moves.
        return [
            jnp.copy(lax.convert_element_type(array, each.dtype).reshape(each.shape))
            for array, each in zip(arrays, types, strict=True)
        ]

    return own
