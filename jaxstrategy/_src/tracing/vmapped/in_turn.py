"""Replicas that share a device and compute one after the other: `in_turn`.

What XLA makes of a batch of matrix products or sums depends on how many there are, and
with it how numbers are rounded. One replica's own operations, in a loop over the
replicas of a device, are mostly rounded alike however many take turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core
from jax.extend.core import DropVar

from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.tracing.jaxprs.visit import (
    Equation,
    Jaxpr,
    Var,
    closed,
    hidden,
    is_along,
    jaxpr_of,
    variables,
    with_jaxprs,
)
from jaxstrategy._src.values.arrays import Function


def in_turn(jaxpr: Jaxpr, axes: Sequence[str]) -> Jaxpr:
    """`jaxpr`, which computes all between collectives in turn.

    Args:
      jaxpr: of one replica, for `jax.vmap` if several share a device.
      axes: along which replicas differ.
    """

    def is_together(eqn: Equation) -> bool:
        if eqn.effects or any(is_key(var.aval.dtype) for var in eqn.outvars):
            return True  # random keys are whole numbers
        return any(is_along(each, axes) for each in (eqn, *hidden(eqn.params)))

    last: dict[Var, int] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        last.update(dict.fromkeys(variables(eqn.invars), number))
    last.update(dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns)))
    eqns: list[Equation] = []
    groups = itertools.groupby(
        enumerate(jaxpr.eqns), lambda numbered: is_together(numbered[1])
    )
    for together, group in groups:
        numbers, found = zip(*group, strict=True)
        if together:
            eqns += (_with_inner(eqn, axes) for eqn in found)
            continue
        made = (var for eqn in found for var in eqn.outvars)
        wanted = [
            var
            for var in made
            if not isinstance(var, DropVar) and last.get(var, -1) > numbers[-1]
        ]
        eqns += _call(found, wanted)
    whole: Any = jaxpr
    effects = frozenset[Any](jaxpr.effects).union(*(eqn.effects for eqn in eqns))
    return whole.replace(eqns=eqns, effects=effects)


def _with_inner(eqn: Any, axes: Sequence[str]) -> Equation:
    """A loop or a branch with collectives, whose other parts are computed in turn."""
    params = {
        name: with_jaxprs(value, lambda inner: in_turn(inner, axes))
        for name, value in eqn.params.items()
    }
    return eqn.replace(params=params)


def _call(eqns: Sequence[Equation], wanted: Sequence[Var]) -> list[Equation]:
    """The equations as one, of a function that replicas call in turn."""
    made = {var for eqn in eqns for var in eqn.outvars}
    read = (var for eqn in eqns for var in variables(eqn.invars))
    given = [var for var in dict.fromkeys(read) if var not in made]
    function = core.jaxpr_as_fun(closed(jaxpr_of(given, list(eqns), wanted)))
    types = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
        for x in (var.aval for var in given)
    ]
    call: Any = jax.make_jaxpr(_taking_turns(function))(*types)
    names = {
        **dict(zip(call.jaxpr.invars, given, strict=True)),
        **dict(zip(call.jaxpr.outvars, wanted, strict=True)),
    }
    return [
        eqn.replace(
            invars=[names.get(atom, atom) for atom in eqn.invars],
            outvars=[names.get(var, var) for var in eqn.outvars],
        )
        for eqn in call.jaxpr.eqns
    ]


def _taking_turns(function: Function) -> Function:
    @custom_vmap
    def called(*operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    @called.def_vmap
    def _of_several(
        size: int, is_batched: Sequence[bool], *operands: jax.Array
    ) -> tuple[list[jax.Array], list[bool]]:
        pairs = list(zip(operands, is_batched, strict=True))

        def turn(number: jax.Array) -> list[jax.Array]:
            return function(*(x[number] if own else x for x, own in pairs))

        results = lax.map(turn, jnp.arange(size))
        return results, [True] * len(results)

    return called
