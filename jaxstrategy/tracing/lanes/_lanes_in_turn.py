"""What lanes do one after the other: `in_turn`."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap

from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing.lanes._one_equation import (
    function_of,
    on_contents,
    references,
    with_contents,
)
from jaxstrategy.values._types import Function


def in_turn(eqn: Equation) -> Function:
    """An equation without collectives that each lane computes by itself."""
    held = references(eqn)
    function = on_contents(function_of(eqn), held)

    @custom_vmap
    def called(*operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    @called.def_vmap
    def _of_lanes(size: int, is_batched: list[bool], *operands: jax.Array) -> Any:
        own = [x for x, batched in zip(operands, is_batched, strict=True) if batched]

        # Not `called` itself: JAX 0.10 has no rule for its references in a loop.
        def one(lane: list[jax.Array]) -> list[jax.Array]:
            lanes = iter(lane)
            pairs = zip(operands, is_batched, strict=True)
            return function(*(next(lanes) if b else x for x, b in pairs))

        results = lax.map(one, own)
        return results, [True] * len(results)

    return with_contents(called, held)
