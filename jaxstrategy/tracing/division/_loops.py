"""Loops over layers of which each replica has a part: `divided_loop`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import Literal

from jaxstrategy.tracing._jaxpr_types import Equation, Var
from jaxstrategy.tracing.division._borders import LoopSum
from jaxstrategy.tracing.division._replica_values import (
    Evaluation,
    ReplicaValues,
)
from jaxstrategy.tracing.replication._control import scan_counts
from jaxstrategy.values._types import Leaf


def layers_in_parts(eqn: Equation, parts: Mapping[Var, int]) -> dict[int, int]:
    """The operands of a loop that it can gather turn by turn, and their dimensions.

    Args:
      eqn: a `scan`.
      parts: the arrays of which each replica has a part.
    """
    first = sum(scan_counts(eqn))
    return {
        place: parts[atom]
        for place, atom in enumerate(eqn.invars)
        # Along the first dimension are the turns: each would need another's part.
        if place >= first and not isinstance(atom, Literal) and parts.get(atom, 0) > 0
    }


def divided_loop(
    eqn: Equation, layers: Mapping[int, int], sums: Mapping[Var, LoopSum]
) -> Evaluation:
    """A loop that gathers in each turn what it reads, and sums what it makes.

    Args:
      eqn: a `scan`.
      layers: the operands of which each replica has a part, with their dimensions.
      sums: what it stacks only for a sum of which each replica needs a part; by the
        sum. They are then parts of the sum.
    """
    n_consts, n_carry = scan_counts(eqn)
    first = n_consts + n_carry
    function = core.jaxpr_as_fun(eqn.params["jaxpr"])
    summed = {
        list(eqn.outvars).index(each.stacked): sum_ for sum_, each in sums.items()
    }

    def evaluate(values: ReplicaValues) -> None:
        operands = [
            values.parts[atom] if place in layers else values.whole(atom)
            for place, atom in enumerate(eqn.invars)
        ]

        collectives = values.collectives

        def body(carry: list[Leaf], layer: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
            whole = [
                collectives.gathered(x, layers[place] - 1, eqn.invars[place], True)
                if place in layers
                else x
                for place, x in enumerate(layer, start=first)
            ]
            results = function(*operands[:n_consts], *carry, *whole)
            stacked = [
                _part_of_sum(x, summed[place], sums, values) if place in summed else x
                for place, x in enumerate(results[n_carry:], start=n_carry)
            ]
            return results[:n_carry], stacked

        carry, stacked = lax.scan(
            body, operands[n_consts:first], operands[first:], **_options(eqn)
        )
        for place, (var, value) in enumerate(
            zip(eqn.outvars, [*carry, *stacked], strict=True)
        ):
            if place not in summed:
                values.keep([var], [value])
        for result, each in sums.items():
            values.parts[result] = stacked[
                list(eqn.outvars).index(each.stacked) - n_carry
            ]

    return evaluate


def _part_of_sum(
    array: jax.Array, result: Var, sums: Mapping[Var, LoopSum], values: ReplicaValues
) -> jax.Array:
    for dtype in sums[result].dtypes:
        array = lax.convert_element_type(array, dtype)
    dimension = sums[result].dimension - 1
    return values.collectives.scattered(array, dimension, result, True)


def _options(eqn: Equation) -> dict[str, Any]:
    names = ("length", "reverse", "unroll", "_split_transpose")
    return {name: eqn.params[name] for name in names if name in eqn.params}
