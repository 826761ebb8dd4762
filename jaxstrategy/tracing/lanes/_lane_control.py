"""Branches, loops and callbacks of replicas that share a device.

Where lanes decide otherwise, `jax.vmap` computes all branches, and all turns of a loop
until the last lane has ended. What is called there on the host would be called for
replicas that have not decided so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing.lanes._lane_axes import LaneAxes
from jaxstrategy.tracing.lanes._lanes_in_turn import in_turn
from jaxstrategy.tracing.lanes._one_equation import (
    on_contents,
    references,
    with_contents,
)
from jaxstrategy.tracing.replication._collective_table import is_along
from jaxstrategy.tracing.replication._jaxprs import hidden
from jaxstrategy.tracing.replication._site import Site
from jaxstrategy.values._types import Function, Leaf

_CALLBACKS = frozenset(
    ("pure_callback", "io_callback", "debug_callback", "debug_print", "buffer_callback")
)


@final
@dataclasses.dataclass(frozen=True)
class LaneControl:
    """What takes the place of branches, loops and callbacks.

    Attributes:
      axes: of the replicas.
      has_groups: whether the step has collectives of some replicas only.
    """

    axes: LaneAxes
    has_groups: bool

    def in_place_of(self, eqn: Equation) -> Function | None:
        """The function that takes the place of an equation; None: it stays.

        Raises:
          NotImplementedError: a callback where only some groups of replicas come.
        """
        name = eqn.primitive.name
        if name in _CALLBACKS:
            return self._once_for_each(eqn)
        if name not in ("cond", "while"):
            return None
        inside = list(hidden(eqn.params))
        calls = any(each.primitive.name in _CALLBACKS for each in inside)
        if any(self._meets(each) for each in inside):
            if calls and self.has_groups:
                raise NotImplementedError(_in_groups(eqn))
            return self._branch(eqn) if name == "cond" else self._loop(eqn)
        if calls:
            return in_turn(eqn, self.axes)
        # `jax.vmap` chooses between values, and not between what references hold.
        return _chosen(eqn) if name == "cond" and references(eqn) else None

    def _branch(self, eqn: Equation) -> Function:
        """All replicas that meet in a branch decide alike, and so do all lanes."""
        chosen = _chosen(eqn)
        if self.has_groups:
            return chosen
        return lambda index, *operands: chosen(self._agreed(index), *operands)

    def _loop(self, eqn: Equation) -> Function:
        """All replicas that meet in a loop go on together."""
        return self._loop_of_groups(eqn) if self.has_groups else self._loop_of_all(eqn)

    def _loop_of_all(self, eqn: Equation) -> Function:
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        condition = core.jaxpr_as_fun(eqn.params["cond_jaxpr"])
        body = core.jaxpr_as_fun(eqn.params["body_jaxpr"])

        def repeated(*operands: Leaf) -> Sequence[jax.Array]:
            own, shared = operands[:n], operands[n : n + m]

            def goes_on(carry: Sequence[jax.Array]) -> jax.Array:
                return self._agreed(condition(*own, *carry)[0])

            def turn(carry: Sequence[jax.Array]) -> Sequence[jax.Array]:
                return body(*shared, *carry)

            return lax.while_loop(goes_on, turn, list(operands[n + m :]))

        return repeated

    def _loop_of_groups(self, eqn: Equation) -> Function:
        """A loop that some groups of replicas may end before others.

        All go on until the last has ended: here the collectives of a group are those
        of all replicas.
        """
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        condition = core.jaxpr_as_fun(eqn.params["cond_jaxpr"])
        held = [place - n for place in references(eqn) if n <= place < n + m]
        body = on_contents(core.jaxpr_as_fun(eqn.params["body_jaxpr"]), held)

        def repeated(*operands: Leaf) -> Sequence[jax.Array]:
            own, shared = operands[:n], list(operands[n : n + m])
            count = len(operands) - n - m

            def decision(carry: Sequence[jax.Array]) -> jax.Array:
                return condition(*own, *carry[:count])[0]

            def goes_on(carry: Sequence[jax.Array]) -> jax.Array:
                number = lax.convert_element_type(decision(carry), jnp.int32)
                return lax.pmax(number, self.axes.both) != 0

            def turn(carry: Sequence[jax.Array]) -> list[jax.Array]:
                for place, content in zip(held, carry[count:], strict=True):
                    shared[place] = content
                is_own = decision(carry)
                pairs = zip(body(*shared, *carry[:count]), carry, strict=True)
                return [jnp.where(is_own, new, old) for new, old in pairs]

            contents = [operands[n + place] for place in held]
            first = [*operands[n + m :], *contents]
            return lax.while_loop(goes_on, turn, first)

        return with_contents(repeated, [place + n for place in held])

    def _agreed(self, decision: jax.Array) -> jax.Array:
        """What all lanes have decided, which `jax.vmap` then takes for one value."""
        number = lax.convert_element_type(decision, jnp.int32)
        agreed = lax.pmax(number, self.axes.lanes)
        return lax.convert_element_type(agreed, decision.dtype)

    def _once_for_each(self, eqn: Equation) -> Function | None:
        """A callback that is called for each replica."""
        params = dict(eqn.params)
        if params.get("ordered"):
            return in_turn(eqn, self.axes)
        if "vmap_method" not in params:
            return None  # JAX itself calls it for each
        params["vmap_method"] = "sequential"
        primitive: Any = eqn.primitive
        return lambda *operands: primitive.bind(*operands, **params)

    def _meets(self, eqn: Equation) -> bool:
        """Whether replicas have to come there together."""
        is_number = eqn.primitive.name == "axis_index"
        return is_along(eqn, self.axes.both) and not is_number


def _chosen(eqn: Equation) -> Function:
    """A branch of the contents of references."""
    held = references(eqn)
    inside = [place - 1 for place in held]
    branches = [
        on_contents(core.jaxpr_as_fun(branch), inside)
        for branch in eqn.params["branches"]
    ]

    def chosen(index: jax.Array, *operands: Leaf) -> Sequence[jax.Array]:
        return lax.switch(index, branches, *operands)

    return with_contents(chosen, held)


def _in_groups(eqn: Equation) -> str:
    return (
        f"A `{eqn.primitive.name}` has a callback and a collective in it, and the step "
        "has collectives of groups of replicas, so that not all may come there:\n"
        f"  {Site((eqn,)).line or 'unknown'}\n"
        "Replicas that share a device compute what any of them needs, and would call "
        "it too often. Move the callback out, or give each replica its own device."
    )
