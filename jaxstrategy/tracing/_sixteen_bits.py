"""Collectives of bfloat16 beside inner axes on a CPU: `through_float32`.

XLA's CPU backend ends the process with "Invalid binary instruction opcode copy" when it
compiles a sum, or a largest or smallest value, of bfloat16 over some axes of a mesh
while others are left to it, of whatever size these are (JAX 0.10 and 0.12).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing._rewritten import rewritten_function
from jaxstrategy.tracing.replication._collective_table import Effect, effect_of
from jaxstrategy.values._types import Function

_EFFECTS = (Effect.SUM, Effect.EXTREME, Effect.SUM_SCATTER)


def through_float32(fn: Function) -> Function:
    """`fn` of one replica, of which such collectives are computed in float32."""
    return rewritten_function(fn, _in_float32)


def _in_float32(eqn: Equation) -> Function | None:
    """The function that takes the place of such a collective; None: it stays."""
    is_narrow = [atom.aval.dtype == jnp.bfloat16 for atom in eqn.invars]
    if effect_of(eqn) not in _EFFECTS or not any(is_narrow):
        return None

    def computed(*arrays: jax.Array) -> Sequence[jax.Array]:
        wide = [
            lax.convert_element_type(array, jnp.float32) if narrow else array
            for array, narrow in zip(arrays, is_narrow, strict=True)
        ]
        results = eqn.primitive.bind(*wide, **eqn.params)
        several = results if eqn.primitive.multiple_results else [results]
        return [
            lax.convert_element_type(result, var.aval.dtype)
            for result, var in zip(several, eqn.outvars, strict=True)
        ]

    return computed
