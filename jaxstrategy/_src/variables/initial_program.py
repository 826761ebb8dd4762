"""A user's function that makes an initial value, traced: `InitialProgram`.

What it returns can then be made in the parts that the devices are to have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, final

import jax
import numpy as np
from jax.core import Tracer, eval_context
from jax.errors import (
    ConcretizationTypeError,
    NonConcreteBooleanIndexError,
    TracerArrayConversionError,
    TracerIntegerConversionError,
    UnexpectedTracerError,
)
from jax.extend import core
from jax.sharding import NamedSharding

from jaxstrategy._src.contexts import context
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.random_keys import as_numbers
from jaxstrategy._src.values.types import Value

InitialValue: TypeAlias = Value | Callable[[], Value]
"""A value, or a function without arguments that returns one."""

# What JAX raises where a function looks at numbers that it traces, or at those of a
# step that is being traced.
_LOOKED_AT = (
    ConcretizationTypeError,
    NonConcreteBooleanIndexError,
    TracerArrayConversionError,
    TracerIntegerConversionError,
    UnexpectedTracerError,
)


@final
class InitialProgram:
    """The computation that a function makes of an initial value.

    Args:
      traced: the trace of the function, which returns one array.

    Attributes:
      type: the shape and dtype of the array.
    """

    def __init__(self, traced: Any) -> None:
        self._traced = traced
        self._run = core.jaxpr_as_fun(traced)
        (made,) = traced.out_avals
        self.type = jax.ShapeDtypeStruct(made.shape, made.dtype)

    def whole(self) -> jax.Array:
        """The array, made operation by operation, as the function itself would."""
        (array,) = self._run()
        return array

    def on(self, sharding: NamedSharding) -> jax.Array:
        """The array; of a large one each device makes what it is to have.

        In the last place a part may differ from the same numbers made with all others:
        what is left at the end of a row is computed by other instructions than whole
        vectors are (CPU, JAX 0.10 and 0.12). So smaller ones are made whole and divided
        then. With several processes it is the array of the first one's function.
        """
        size = math.prod(self.type.shape) * self.type.dtype.itemsize
        if not mesh.is_large(size) or not self._is_everywhere(sharding):
            return mesh.broadcast(self.whole(), sharding)
        (array,) = jax.jit(self._run, out_shardings=[sharding])()
        return array

    def _is_everywhere(self, sharding: NamedSharding) -> bool:
        """Whether the functions of all processes compute the same."""
        if sharding.is_fully_addressable:
            return True
        constants = self._traced.consts
        if any(map(mesh.is_spread, constants)):
            return False
        texts = [str(self._traced).encode()]
        texts += [np.asarray(as_numbers(each)).tobytes() for each in constants]
        return mesh.are_equal(b"".join(texts), sharding)


def traced(
    fn: Callable[[], Value], settled: Callable[[Value], jax.Array]
) -> InitialValue | InitialProgram:
    """The program that makes what `fn` returns, or that itself if it is known.

    Also `fn`, if it has to be called as it is: it looks at numbers while it is traced,
    or uses those of a step.

    Args:
      fn: the user's function.
      settled: makes an array of what it returns.
    """
    known: list[Value] = []

    def compute() -> list[jax.Array]:
        value = fn()
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            known.append(value)
            return []
        return [settled(value)]

    try:
        # In a step, too, whose own trace must not have what `fn` computes.
        with eval_context(), context.entered(is_initial=True):
            closed = jax.make_jaxpr(compute)()
    except _LOOKED_AT:
        return fn
    if any(isinstance(each, Tracer) for each in closed.consts):  # of a step
        return fn
    return known[0] if known else InitialProgram(closed)
