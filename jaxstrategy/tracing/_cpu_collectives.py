"""Replicas of several CPU devices, of which XLA cannot compile all: `on_cpu_devices`.

XLA's CPU backend ends the process with "Invalid binary instruction opcode copy" when it
compiles a sum, or a largest or smallest value, of bfloat16 over some axes of a mesh
while others are left to it, of whatever size these are (JAX 0.10 and 0.12). So it does,
wherever replicas lie, when it folds the sum of a complex constant.

JAX makes more such sums when it differentiates a function of all replicas: of the
cotangents of what is the same for all, and of what was gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ref import AbstractRef
from jax.typing import DTypeLike

from jaxstrategy.reductions._sums import unfolded
from jaxstrategy.replicas._replicas import SAME, Lies, Replicas
from jaxstrategy.tracing._on_own_devices import on_own_devices
from jaxstrategy.tracing.jaxprs._collectives import Effect, effect_of
from jaxstrategy.tracing.jaxprs._rewrite import rewritten_function
from jaxstrategy.tracing.jaxprs._visit import Atom, Equation
from jaxstrategy.values._types import Function, Leaf, PyTree

_EFFECTS = (Effect.SUM, Effect.EXTREME, Effect.SUM_SCATTER, Effect.GATHER)


def on_cpu_devices(
    fn: Function, replicas: Replicas, taken: Sequence[Lies], returned: PyTree
) -> Function:
    """As `on_own_devices`, with such sums in float32, its derivatives' too."""

    def all_replicas(*given: Leaf) -> PyTree:
        is_wide = [
            lies is SAME and _is_narrow_array(x)
            for x, lies in zip(given, taken, strict=True)
        ]

        def narrowed(*own: jax.Array) -> PyTree:
            return fn(*_converted(own, is_wide, jnp.bfloat16))

        compilable = rewritten_function(narrowed, _in_float32)
        run = on_own_devices(compilable, replicas, taken, returned)
        return run(*_converted(given, is_wide, jnp.float32))

    return all_replicas


def _is_narrow_array(value: Leaf) -> bool:
    kind = jax.typeof(value)
    return kind.dtype == jnp.bfloat16 and not isinstance(kind, AbstractRef)


def _converted(
    values: Sequence[Leaf], which: Sequence[bool], dtype: DTypeLike
) -> list[Leaf]:
    pairs = zip(values, which, strict=True)
    return [lax.convert_element_type(x, dtype) if is_ else x for x, is_ in pairs]


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
    return unfolded(array)
