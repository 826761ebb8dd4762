"""Collectives beside inner axes that a CPU's XLA cannot compile: `through_float32`.

XLA's CPU backend ends the process with "Invalid binary instruction opcode copy" when it
compiles a sum, or a largest or smallest value, of bfloat16 over some axes of a mesh
while others are left to it, of whatever size these are (JAX 0.10 and 0.12). So it does,
wherever they lie, when it folds the sum of a complex constant.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy.tracing._jaxpr_types import Atom, Equation
from jaxstrategy.tracing._rewritten import rewritten_function
from jaxstrategy.tracing.replication._collective_table import Effect, effect_of
from jaxstrategy.values._types import Function

_EFFECTS = (Effect.SUM, Effect.EXTREME, Effect.SUM_SCATTER)


def through_float32(fn: Function) -> Function:
    """`fn` of one replica, of which such collectives are computed in float32."""
    return rewritten_function(fn, _in_float32)


def _in_float32(eqn: Equation) -> Function | None:
    """The function that takes the place of such a collective; None: it stays."""
    if effect_of(eqn) not in _EFFECTS or not any(map(_is_changed, eqn.invars)):
        return None

    def computed(*arrays: jax.Array) -> Sequence[jax.Array]:
        wide = list(map(_compilable, arrays))
        results = eqn.primitive.bind(*wide, **eqn.params)
        several = results if eqn.primitive.multiple_results else [results]
        return [
            lax.convert_element_type(result, var.aval.dtype)
            for result, var in zip(several, eqn.outvars, strict=True)
        ]

    return computed


def _is_changed(atom: Atom) -> bool:
    dtype = atom.aval.dtype
    return dtype == jnp.bfloat16 or jnp.issubdtype(dtype, jnp.complexfloating)


def _compilable(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bfloat16:
        return lax.convert_element_type(array, jnp.float32)
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return lax.optimization_barrier(array) if is_complex else array
