"""What lanes do one after the other: `in_turn`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing._rewritten import rewritten
from jaxstrategy.tracing.lanes._lane_axes import LaneAxes
from jaxstrategy.tracing.lanes._one_equation import (
    function_of,
    on_contents,
    references,
    with_contents,
)
from jaxstrategy.tracing.replication._collective_table import is_along
from jaxstrategy.tracing.replication._jaxprs import hidden, jaxpr_of
from jaxstrategy.values._types import Function


def in_turn(eqn: Equation, axes: LaneAxes) -> Function:
    """An equation without collectives that each lane computes by itself.

    Args:
      eqn: what it computes; it may ask for the number of its lane.
      axes: of the replicas.
    """
    held = references(eqn)
    function = on_contents(function_of(eqn), held)
    if any(_is_lane(each, axes) for each in hidden(eqn.params)):
        return with_contents(_numbered(eqn, function, held, axes), held)

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


def _numbered(
    eqn: Equation, function: Function, held: Sequence[int], axes: LaneAxes
) -> Function:
    """As `in_turn`, where the number of each lane is written out.

    In a loop over the lanes none of them has the name of the axis.
    """

    @custom_vmap
    def called(lane: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    @called.def_vmap
    def _of_lanes(
        size: int, is_batched: list[bool], lane: jax.Array, *operands: jax.Array
    ) -> Any:
        results: list[list[jax.Array]] = []
        for number in range(size):
            own = on_contents(function_of(_of_lane(eqn, number, axes)), held)
            pairs = zip(operands, is_batched[1:], strict=True)
            results.append(own(*(x[number] if b else x for x, b in pairs)))
        stacked = [jnp.stack(each) for each in zip(*results, strict=True)]
        return stacked, [True] * len(stacked)

    # With its number, each lane is another one even if the operands are all the same.
    return lambda *operands: called(axes.lane(), *operands)


def _of_lane(eqn: Equation, number: int, axes: LaneAxes) -> Equation:
    """`eqn` as the lane of this number computes it."""

    def rule(each: Equation) -> Function | None:
        if not _is_lane(each, axes):
            return None
        dtype = each.outvars[0].aval.dtype
        return lambda: [jnp.copy(jnp.asarray(number, dtype))]

    alone = jaxpr_of(eqn.invars, [eqn], eqn.outvars)
    (own,) = rewritten(alone, rule, axes.of_lanes).eqns
    return own


def _is_lane(eqn: Equation, axes: LaneAxes) -> bool:
    return eqn.primitive.name == "axis_index" and is_along(eqn, (axes.lanes,))
