"""Branches, loops and callbacks of vmapped replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core

from jaxstrategy._src.tracing.jaxprs.rewrite import (
    function_of,
    on_contents,
    references,
    rewritten,
    with_contents,
)
from jaxstrategy._src.tracing.jaxprs.visit import Equation, hidden, is_along, jaxpr_of
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.tracing.vmapped.collectives import VmappedAxes
from jaxstrategy._src.values.arrays import Function, Leaf


def in_turn(eqn: Equation, axes: VmappedAxes) -> Function:
    """An equation without collectives that each vmapped replica computes by itself."""
    held = references(eqn)
    function = on_contents(function_of(eqn), held)
    if any(_is_index(each, axes) for each in hidden(eqn.params)):
        return with_contents(_numbered(eqn, function, held, axes), held)

    @custom_vmap
    def called(*operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    @called.def_vmap
    def _of_vmapped(size: int, is_batched: list[bool], *operands: jax.Array) -> Any:
        own = [x for x, batched in zip(operands, is_batched, strict=True) if batched]

        # Not `called` itself: JAX 0.10 has no rule for its references in a loop.
        def one(some: list[jax.Array]) -> list[jax.Array]:
            mapped = iter(some)
            pairs = zip(operands, is_batched, strict=True)
            return function(*(next(mapped) if b else x for x, b in pairs))

        results = lax.map(one, own)
        return results, [True] * len(results)

    return with_contents(called, held)


def _numbered(
    eqn: Equation, function: Function, held: Sequence[int], axes: VmappedAxes
) -> Function:
    """As `in_turn`, where the number of each vmapped replica is written out.

    In a loop over the vmapped replicas none of them has the name of the axis.
    """

    @custom_vmap
    def called(index: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    @called.def_vmap
    def _of_vmapped(
        size: int, is_batched: list[bool], index: jax.Array, *operands: jax.Array
    ) -> Any:
        results: list[list[jax.Array]] = []
        for number in range(size):
            own = on_contents(function_of(_of_replica(eqn, number, axes)), held)
            pairs = zip(operands, is_batched[1:], strict=True)
            results.append(own(*(x[number] if b else x for x, b in pairs)))
        stacked = [jnp.stack(each) for each in zip(*results, strict=True)]
        return stacked, [True] * len(stacked)

    # With its number, each vmapped replica is another one even if the operands are all
    # the same.
    return lambda *operands: called(axes.vmapped_index(), *operands)


def _of_replica(eqn: Equation, number: int, axes: VmappedAxes) -> Equation:
    """`eqn` as the vmapped replica of this number computes it."""

    def rule(each: Equation) -> Function | None:
        if not _is_index(each, axes):
            return None
        dtype = each.outvars[0].aval.dtype
        return lambda: [jnp.copy(jnp.asarray(number, dtype))]

    alone = jaxpr_of(eqn.invars, [eqn], eqn.outvars)
    (own,) = rewritten(alone, rule, axes.of_vmapped).eqns
    return own


def _is_index(eqn: Equation, axes: VmappedAxes) -> bool:
    return eqn.primitive.name == "axis_index" and is_along(eqn, (axes.vmapped,))


_CALLBACKS = frozenset(
    ("pure_callback", "io_callback", "debug_callback", "debug_print", "buffer_callback")
)


# Where vmapped replicas decide otherwise, `jax.vmap` computes all branches, and all
# turns of a loop until the last vmapped replica has ended. What is called there on the
# host would be called for replicas that have not decided so.
@final
@dataclasses.dataclass(frozen=True)
class VmappedControlFlow:
    """What takes the place of branches, loops and callbacks."""

    axes: VmappedAxes
    has_groups: bool

    def in_place_of(self, eqn: Equation) -> Function | None:
        """The function that takes the place of an equation; None: it stays."""
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
        """All replicas that meet in a branch decide alike, those of a device too."""
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
        """What all of a device have decided, for `jax.vmap` one value."""
        number = lax.convert_element_type(decision, jnp.int32)
        agreed = lax.pmax(number, self.axes.vmapped)
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
