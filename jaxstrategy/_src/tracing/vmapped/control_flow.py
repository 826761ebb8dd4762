"""Branches, loops and callbacks of vmapped replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from jaxstrategy._src.tracing.jaxprs.visit import (
    Equation,
    inner_eqns,
    is_along,
    jaxpr_of,
)
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.tracing.vmapped.collectives import VmappedAxes
from jaxstrategy._src.values.arrays import Function, Leaf


def in_turn(eqn: Equation, axes: VmappedAxes) -> Function:
    """Evaluates an equation without collectives for one replica after the other."""
    refs = references(eqn)
    function = on_contents(function_of(eqn), refs)
    if any(_is_index(each, axes) for each in inner_eqns(eqn.params)):
        return with_contents(_unrolled(eqn, function, refs, axes), refs)

    return with_contents(sequential(function), refs)


def sequential(function: Function) -> Function:
    """`function`, which `jax.vmap` calls in a loop."""

    @custom_vmap
    def called(*operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    # Not `called` in the loop: JAX 0.10 has no rule for its references there.
    @called.def_vmap
    def _in_loop(
        size: int, is_batched: Sequence[bool], *operands: jax.Array
    ) -> tuple[list[jax.Array], list[bool]]:
        pairs = list(zip(operands, is_batched, strict=True))

        def one(number: jax.Array) -> list[jax.Array]:
            return function(*(x[number] if batched else x for x, batched in pairs))

        results = lax.map(one, jnp.arange(size))
        return results, [True] * len(results)

    return called


def _unrolled(
    eqn: Equation, function: Function, refs: Sequence[int], axes: VmappedAxes
) -> Function:
    """As `in_turn`, unrolled with the index of each replica as a constant.

    In a loop over vmapped replicas the name of their axis would be unbound.
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
            one = on_contents(function_of(_with_index(eqn, number, axes)), refs)
            pairs = zip(operands, is_batched[1:], strict=True)
            results.append(one(*(x[number] if b else x for x, b in pairs)))
        stacked = [jnp.stack(each) for each in zip(*results, strict=True)]
        return stacked, [True] * len(stacked)

    # The index is batched, even if no operand is.
    return lambda *operands: called(axes.vmapped_index(), *operands)


def _with_index(eqn: Equation, number: int, axes: VmappedAxes) -> Equation:
    """`eqn` with a constant for the index of the vmapped replica."""

    def rule(each: Equation) -> Function | None:
        if not _is_index(each, axes):
            return None
        dtype = each.outvars[0].aval.dtype
        return lambda: [jnp.copy(jnp.asarray(number, dtype))]

    alone = jaxpr_of(eqn.invars, [eqn], eqn.outvars)
    (new,) = rewritten(alone, rule, axes.in_vmap).eqns
    return new


def _is_index(eqn: Equation, axes: VmappedAxes) -> bool:
    return eqn.primitive.name == "axis_index" and is_along(eqn, (axes.vmapped,))


_CALLBACKS = frozenset(
    ("pure_callback", "io_callback", "debug_callback", "debug_print", "buffer_callback")
)


# Where the predicates of vmapped replicas differ, `jax.vmap` computes all branches, and
# loops until the last replica has ended. Callbacks would be called for all of them.
def control_flow(eqn: Equation, axes: VmappedAxes) -> Function | None:
    """Replaces branches, loops and callbacks; None for other equations."""
    name = eqn.primitive.name
    if name in _CALLBACKS:
        return _callback(eqn, axes)
    if name not in ("cond", "while"):
        return None
    inside = list(inner_eqns(eqn.params))
    has_callbacks = any(each.primitive.name in _CALLBACKS for each in inside)
    if any(
        is_along(each, axes.both) and each.primitive.name != "axis_index"
        for each in inside
    ):
        if has_callbacks and axes.has_groups:
            raise NotImplementedError(_callback_in_groups(eqn))
        return _branch(eqn, axes) if name == "cond" else _loop(eqn, axes)
    if has_callbacks:
        return in_turn(eqn, axes)
    # `jax.vmap` selects between values, not between contents of references.
    return _switch(eqn) if name == "cond" and references(eqn) else None


def _branch(eqn: Equation, axes: VmappedAxes) -> Function:
    """A branch with collectives, for which all replicas decide alike."""
    switch = _switch(eqn)
    if axes.has_groups:
        return switch

    def agreed(index: jax.Array, *operands: Leaf) -> Sequence[jax.Array]:
        # Of all replicas of a device, unbatched under `jax.vmap`.
        return switch(lax.pmax(index, axes.vmapped), *operands)

    return agreed


def _loop(eqn: Equation, axes: VmappedAxes) -> Function:
    """A loop with collectives, which all replicas end together.

    With collectives of groups, some of which may end before others, all go on until the
    last has ended, as the collectives are here those of all.
    """
    n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition = core.jaxpr_as_fun(eqn.params["cond_jaxpr"])
    over = axes.both if axes.has_groups else (axes.vmapped,)
    refs = [i - n for i in references(eqn) if axes.has_groups and n <= i < n + m]
    body = on_contents(core.jaxpr_as_fun(eqn.params["body_jaxpr"]), refs)

    def repeated(*operands: Leaf) -> Sequence[jax.Array]:
        cond_consts, body_consts = operands[:n], list(operands[n : n + m])
        count = len(operands) - n - m

        def decision(carry: Sequence[jax.Array]) -> jax.Array:
            return condition(*cond_consts, *carry[:count])[0]

        def any_goes_on(carry: Sequence[jax.Array]) -> jax.Array:
            number = lax.convert_element_type(decision(carry), jnp.int32)
            return lax.pmax(number, over) != 0

        def iteration(carry: Sequence[jax.Array]) -> list[jax.Array]:
            for index, content in zip(refs, carry[count:], strict=True):
                body_consts[index] = content
            after = body(*body_consts, *carry[:count])
            if not axes.has_groups:
                return list(after)
            goes_on = decision(carry)
            pairs = zip(after, carry, strict=True)
            return [jnp.where(goes_on, new, old) for new, old in pairs]

        contents = [operands[n + index] for index in refs]
        start = [*operands[n + m :], *contents]
        return lax.while_loop(any_goes_on, iteration, start)

    return with_contents(repeated, [index + n for index in refs])


def _callback(eqn: Equation, axes: VmappedAxes) -> Function | None:
    """A callback that is called once for each replica."""
    params = dict(eqn.params)
    if params.get("ordered"):
        return in_turn(eqn, axes)
    if "vmap_method" not in params:
        return None  # JAX does so
    params["vmap_method"] = "sequential"
    primitive: Any = eqn.primitive
    return lambda *operands: primitive.bind(*operands, **params)


def _switch(eqn: Equation) -> Function:
    """A branch on the contents of references."""
    refs = references(eqn)
    branches = [
        on_contents(core.jaxpr_as_fun(branch), [index - 1 for index in refs])
        for branch in eqn.params["branches"]
    ]

    def switch(index: jax.Array, *operands: Leaf) -> Sequence[jax.Array]:
        return lax.switch(index, branches, *operands)

    return with_contents(switch, refs)


def _callback_in_groups(eqn: Equation) -> str:
    return (
        f"A `{eqn.primitive.name}` has a callback and a collective in it, and the step "
        "has collectives of groups of replicas, so that not all may come there:\n"
        f"  {Site((eqn,)).line or 'unknown'}\n"
        "Replicas that share a device compute what any of them needs, and would call "
        "it too often. Move the callback out, or give each replica its own device."
    )
