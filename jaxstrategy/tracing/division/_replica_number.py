"""The number of a replica beside inner axes: `numbered_here`.

JAX makes of `axis_index` beside automatic axes a `shard_map` when it lowers a program,
on the mesh where the equation was traced (JAX 0.10 and 0.12). A step with divided state
is traced without one: its loops, branches and calls would end in "The context mesh
cannot be empty".
"""

from __future__ import annotations

import jax

from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing._rewritten import rewritten_function
from jaxstrategy.values._types import Function


def numbered_here(fn: Function) -> Function:
    """`fn` of one replica, with its numbers traced where this is called.

    Args:
      fn: returns a pytree of arrays.
    """
    return rewritten_function(fn, _traced_here)


def _traced_here(eqn: Equation) -> Function | None:
    """The function that takes the place of an `axis_index`; None: another equation."""
    if eqn.primitive.name != "axis_index":
        return None

    def computed() -> list[jax.Array]:
        return [eqn.primitive.bind(**eqn.params)]

    return computed
