"""Partitions a step into equations of each replica and equations computed once.

After the last reduction everything is equal on all replicas. What is equal, and read by
nothing that varies, is computed once, outside of the `shard_map`, where XLA partitions
it over the devices. Y. Xu et al. Automatic cross-replica sharding of
weight update in data-parallel training. arXiv:2004.13336 (2020).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, final

from jax.extend import core
from jax.extend.core import DropVar, Literal

from jaxstrategy._src.reductions import rows as _rows
from jaxstrategy._src.reductions.rows import ShardFunction
from jaxstrategy._src.tracing.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Var,
    all_eqns,
    inner_jaxprs,
    jaxpr_of,
    live_equations,
    plain,
    read_by,
    variables,
)
from jaxstrategy._src.values.arrays import Leaf

_Names: TypeAlias = dict[Var, Atom]
# They call a function once, and do nothing else. Functions with rules for derivatives
# are not inlined: the program may be differentiated. Nor is `checkpoint`, which keeps
# XLA from merging what is computed twice on purpose.
_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr"}


@final
@dataclasses.dataclass(frozen=True)
class InlinedJaxpr:
    """A jaxpr without calls; its constants are the last inputs."""

    jaxpr: Jaxpr
    constants: list[Leaf]
    calls: Mapping[Var, tuple[Equation, ...]]  # around the equation of a variable


# So that reductions inside jitted functions can be where the step is partitioned.
def inline_calls(
    jaxpr: Jaxpr, stays: Callable[[Equation], bool] = lambda _: False
) -> InlinedJaxpr:
    """Inlines calls, but those of shard functions, and equations that `stays` names."""
    eqns: list[Equation] = []
    constants: list[Leaf] = []
    constant_vars: list[Var] = []
    around: dict[Var, tuple[Equation, ...]] = {}

    def callee(eqn: Equation) -> ClosedJaxpr | None:
        """The function of an equation that only calls it; None of others."""
        name = eqn.primitive.name
        if stays(eqn) or name not in {**_CALLS, **_WRAPPERS}:
            return None
        if name in _CALLS:
            return None if shard_function(eqn) else eqn.params[_CALLS[name]]
        called = eqn.params[_WRAPPERS[name]]
        has_any = _wraps_shard_function(plain(called))
        has_any = has_any or any(map(stays, all_eqns(plain(called))))
        return called if has_any else None

    def add(inner: Any, names: _Names, calls: tuple[Equation, ...]) -> list[Atom]:
        """Adds equations, with variables replaced by `names`; returns the results."""
        for eqn in inner.eqns:
            operands = [_read(names, atom) for atom in eqn.invars]
            if (called := callee(eqn)) is not None:
                function: Any = plain(called)
                fresh = [core.Var(var.aval) for var in function.constvars]
                constants.extend(getattr(called, "consts", ()))
                constant_vars.extend(fresh)
                inputs = (*function.invars, *function.constvars)
                own = dict(zip(inputs, (*operands, *fresh), strict=True))
                results = add(function, own, (eqn, *calls))
                names.update(zip(eqn.outvars, results, strict=True))
                continue
            if calls:
                named = (var for var in eqn.outvars if not isinstance(var, DropVar))
                names.update((var, core.Var(var.aval)) for var in named)
            outvars = [_read(names, var) for var in eqn.outvars]
            around.update((var, calls) for var in outvars if calls)
            eqns.append(eqn.replace(invars=operands, outvars=outvars))
        return [_read(names, atom) for atom in inner.outvars]

    outvars = add(jaxpr, {}, ())
    inlined = jaxpr_of([*jaxpr.invars, *constant_vars], eqns, outvars)
    return InlinedJaxpr(inlined, constants, around)


def _read(names: _Names, atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


# Other operations take about as long as reading their operands.
_EXPENSIVE = frozenset(("dot_general", "conv_general_dilated", "sort", "fft"))


@final
@dataclasses.dataclass(frozen=True)
class Partition:
    """The equations of a step that each replica computes, and those computed once."""

    per_replica: Sequence[Equation]
    global_: Sequence[Equation]
    duplicated: Sequence[Equation]  # in `per_replica`, and computed once as well
    unused: Sequence[Equation]

    @cached_property
    def read_per_replica(self) -> set[Var]:
        return read_by(self.per_replica)

    @cached_property
    def read_by_users(self) -> set[Var]:
        """`read_per_replica`, and what unused equations read.

        Whether a step returns its loss, too, must not change how state is sharded.
        """
        return self.read_per_replica | read_by(self.unused)

    @cached_property
    def read_globally(self) -> set[Var]:
        return read_by((*self.duplicated, *self.global_))

    @cached_property
    def made_globally(self) -> set[Var]:
        eqns = (*self.duplicated, *self.global_)
        return {var for eqn in eqns for var in eqn.outvars}


def partition(
    jaxpr: Jaxpr,
    varies: Callable[[Atom], bool],
    is_per_replica: Callable[[Equation], bool],
) -> Partition:
    """Partitions a step; `is_per_replica` names equations that may not be global."""
    per_replica: list[Equation] = []
    global_: list[Equation] = []
    read: set[Var] = set()
    alive, unused = set(variables(jaxpr.outvars)), list[Equation]()
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and alive.isdisjoint(eqn.outvars):
            unused.append(eqn)
            continue
        alive.update(variables(eqn.invars))
        may_be_global = _is_equal(eqn, varies) and not is_per_replica(eqn)
        if may_be_global and read.isdisjoint(eqn.outvars):
            global_.append(eqn)
        else:
            per_replica.append(eqn)
            read.update(variables(eqn.invars))
    per_replica.reverse()
    global_.reverse()
    used = read_by(global_).union(variables(jaxpr.outvars))
    duplicated = _cheap_equations(per_replica, set(jaxpr.invars), used, varies)
    return Partition(per_replica, global_, duplicated, unused)


def _is_equal(eqn: Equation, varies: Callable[[Atom], bool]) -> bool:
    """Whether it computes the same on all replicas, without effects."""
    # Collectives have an effect, the name of their axis (JAX 0.10 and 0.12).
    return not eqn.effects and not any(map(varies, (*eqn.invars, *eqn.outvars)))


def _cheap_equations(
    per_replica: Sequence[Equation],
    inputs: set[Var],
    used: set[Var],
    varies: Callable[[Atom], bool],
) -> list[Equation]:
    """The equations that compute `used` from inputs alone, cheaply."""
    known, cheap = set(inputs), list[Equation]()
    for eqn in per_replica:
        is_cheap = eqn.primitive.name not in _EXPENSIVE
        is_cheap = is_cheap and not any(inner_jaxprs(eqn.params))
        is_cheap = is_cheap and _is_equal(eqn, varies)
        if is_cheap and known.issuperset(variables(eqn.invars)):
            cheap.append(eqn)
            known.update(eqn.outvars)
    return live_equations(cheap, used)


# Primitives around the call of a shard function, and the parameter with the call.
_WRAPPERS = {"custom_jvp_call": "call_jaxpr", "custom_vmap_call": "call"}
_SHAPES = frozenset(("reshape", "transpose", "squeeze", "broadcast_in_dim"))


def shard_function(eqn: Equation) -> ShardFunction | None:
    """The function that an equation calls, if it can be computed from shards."""
    if eqn.primitive.name != "jit":
        return None
    operands = [atom.aval for atom in eqn.invars]
    results = [var.aval for var in eqn.outvars]
    return _rows.called_by(eqn.params["name"], operands, results)


def _wraps_shard_function(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr is one call of a shard function, perhaps with reshapes.

    Our rule for its derivatives holds for shards, too. A user's rule is around ours, so
    that this is False, and its call is not inlined.
    """
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name not in _SHAPES]
    if len(eqns) != 1:
        return False
    if eqns[0].primitive.name != "custom_vmap_call":
        return shard_function(eqns[0]) is not None
    inside = plain(eqns[0].params[_WRAPPERS["custom_vmap_call"]])
    return len(inside.eqns) == 1 and shard_function(inside.eqns[0]) is not None
