"""Functions of one replica as functions of all: `on_replicas`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ref import AbstractRef
from jax.typing import DTypeLike

from jaxstrategy._src.reductions.operations import unfolded
from jaxstrategy._src.replicas.replicas import REPLICATED, LayoutOrDimension, Replicas
from jaxstrategy._src.tracing.jaxprs.rewrite import (
    rewritten_function,
    without_collectives,
)
from jaxstrategy._src.tracing.jaxprs.visit import Atom, Effect, Equation, effect_of
from jaxstrategy._src.tracing.numbered_prints import on_own_devices
from jaxstrategy._src.tracing.vmapped.replicas import on_shared_devices
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree

_EFFECTS = (Effect.SUM, Effect.EXTREME, Effect.SUM_SCATTER, Effect.GATHER)


def on_cpu_devices(
    fn: Function,
    replicas: Replicas,
    taken: Sequence[LayoutOrDimension],
    returned: PyTree,
) -> Function:
    """As `on_own_devices`, with sums of bfloat16 in float32, in derivatives too.

    Beside automatic axes XLA cannot compile others on CPUs.
    """

    def all_replicas(*inputs: Leaf) -> PyTree:
        is_widened = [
            layout is REPLICATED and _is_bfloat16_array(x)
            for x, layout in zip(inputs, taken, strict=True)
        ]

        def narrowed(*own: jax.Array) -> PyTree:
            return fn(*_converted(own, is_widened, jnp.bfloat16))

        compilable = rewritten_function(narrowed, _in_float32)
        run = on_own_devices(compilable, replicas, taken, returned)
        return run(*_converted(inputs, is_widened, jnp.float32))

    return all_replicas


def _is_bfloat16_array(value: Leaf) -> bool:
    kind = jax.typeof(value)
    return kind.dtype == jnp.bfloat16 and not isinstance(kind, AbstractRef)


def _converted(
    values: Sequence[Leaf], which: Sequence[bool], dtype: DTypeLike
) -> list[Leaf]:
    pairs = zip(values, which, strict=True)
    return [lax.convert_element_type(x, dtype) if is_ else x for x, is_ in pairs]


def _in_float32(eqn: Equation) -> Function | None:
    """A rule that computes collectives in dtypes which XLA can compile."""
    if effect_of(eqn) not in _EFFECTS or not any(map(_needs_change, eqn.invars)):
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


def _needs_change(atom: Atom) -> bool:
    dtype = atom.aval.dtype
    return dtype == jnp.bfloat16 or jnp.issubdtype(dtype, jnp.complexfloating)


def _compilable(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bfloat16:
        return lax.convert_element_type(array, jnp.float32)
    return unfolded(array)


def on_replicas(
    fn: Function,
    replicas: Replicas,
    taken: Sequence[LayoutOrDimension],
    returned: PyTree,
) -> Function:
    """`fn` of one replica as a function of arrays of all replicas.

    Args:
      taken: the layout of each input.
      returned: the same for results, a pytree prefix.
    """
    if replicas.per_device > 1:
        return on_shared_devices(fn, replicas, taken, returned)
    if replicas.count == 1:
        fn = without_collectives(fn, replicas.axes)
    if replicas.inner_axes and replicas.devices[0].platform == "cpu":
        return on_cpu_devices(fn, replicas, taken, returned)
    return on_own_devices(fn, replicas, taken, returned)
