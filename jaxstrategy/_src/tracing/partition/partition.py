"""A step, flat, and parted into each replica's equations and those of all.

After the last reduction everything is equal on all replicas. What is equal, and is
needed by nothing that differs, is computed once for all, outside of the `shard_map`,
where XLA divides it over the devices. Y. Xu et al. Automatic cross-replica sharding of
weight update in data-parallel training. arXiv:2004.13336 (2020).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, final

from jax.extend import core
from jax.extend.core import DropVar, Literal

from jaxstrategy._src.tracing.jaxprs.visit import (
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
    variables,
)
from jaxstrategy._src.tracing.partition.values import (
    AROUND_FUNCTIONS,
    is_around_function,
    shard_function,
)
from jaxstrategy._src.values.arrays import Leaf

_Names: TypeAlias = dict[Var, Atom]
# What calls a function once, and does nothing else. A function with a rule of its own
# for derivatives stays: somebody may differentiate the program. So does `checkpoint`,
# which keeps XLA from joining what is computed twice on purpose.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}


@final
@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr without calls."""

    jaxpr: Jaxpr
    constants: list[Leaf]
    calls: Mapping[Var, tuple[Equation, ...]]


# A reduction inside a jitted function could not be where the step is divided.
def flattened(
    jaxpr: Jaxpr, stays: Callable[[Equation], bool] = lambda _: False
) -> Flat:
    """`jaxpr` with the equations of the functions that it calls in place of the calls.

    Calls of functions that can be computed from parts stay as they are.
    """
    flattening = _Flattening(stays)
    names: _Names = {}
    flattening.add(jaxpr.eqns, names)
    outvars = [_read(names, atom) for atom in jaxpr.outvars]
    invars = [*jaxpr.invars, *flattening.constant_vars]
    flat = jaxpr_of(invars, flattening.eqns, outvars)
    return Flat(flat, flattening.constants, flattening.calls)


@final
class _Flattening:
    """The equations so far, and the constants that they need."""

    def __init__(self, stays: Callable[[Equation], bool]) -> None:
        self._stays = stays
        self.eqns: list[Equation] = []
        self.constants: list[Leaf] = []
        self.constant_vars: list[Var] = []
        self.calls: dict[Var, tuple[Equation, ...]] = {}

    def add(
        self,
        eqns: Sequence[Equation],
        names: _Names,
        calls: tuple[Equation, ...] = (),
    ) -> None:
        """Add equations, in which `names` stand for some variables."""
        for eqn in eqns:
            operands = [_read(names, atom) for atom in eqn.invars]
            called = None if self._stays(eqn) else self._callee(eqn)
            if called is None:
                outvars = self._outvars(eqn, names) if calls else eqn.outvars
                self.calls.update((var, calls) for var in outvars if calls)
                self.eqns.append(_with_atoms(eqn, operands, outvars))
                continue
            inner = plain(called)
            own: _Names = dict(zip(inner.invars, operands, strict=True))
            own.update(self._constants(called))
            self.add(inner.eqns, own, (eqn, *calls))
            results = [_read(own, atom) for atom in inner.outvars]
            names.update(zip(eqn.outvars, results, strict=True))

    def _callee(self, eqn: Equation) -> ClosedJaxpr | None:
        """The function that `eqn` calls, and does nothing else; None of others."""
        name = eqn.primitive.name
        if name in AROUND_FUNCTIONS:
            called = eqn.params[AROUND_FUNCTIONS[name]]
            inner = plain(called)
            is_around = is_around_function(inner) or any(
                self._stays(each) for each in all_eqns(inner)
            )
            return called if is_around else None
        if name not in _CALLS or shard_function(eqn) is not None:
            return None
        return eqn.params[_CALLS[name]]

    def _outvars(self, eqn: Equation, names: _Names) -> list[Var]:
        for var in eqn.outvars:
            if not isinstance(var, DropVar):
                names[var] = core.Var(var.aval)
        return [names.get(var, var) for var in eqn.outvars]

    def _constants(self, called: ClosedJaxpr) -> _Names:
        inner = plain(called)
        values = getattr(called, "consts", ())
        fresh = [core.Var(var.aval) for var in inner.constvars]
        self.constants += values
        self.constant_vars += fresh
        return dict(zip(inner.constvars, fresh, strict=True))


def _read(names: _Names, atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _with_atoms(eqn: Any, invars: Sequence[Atom], outvars: Sequence[Var]) -> Equation:
    return eqn.replace(invars=list(invars), outvars=list(outvars))


# They take about as long as reading what they read, which the other side has, too.
_NOT_LIGHT = frozenset(("dot_general", "conv_general_dilated", "sort", "fft"))


@final
@dataclasses.dataclass(frozen=True)
class Partition:
    """A step, divided into what each replica computes and what is computed once."""

    per_replica: Sequence[Equation]
    global_: Sequence[Equation]
    copied: Sequence[Equation]
    unused: Sequence[Equation]

    @cached_property
    def read_per_replica(self) -> frozenset[Var]:
        """The variables that the replicas' equations read."""
        return frozenset(
            variables(atom for eqn in self.per_replica for atom in eqn.invars)
        )

    @cached_property
    def read_by_users(self) -> frozenset[Var]:
        """The variables that the replicas' part of the user's step mentions.

        Whether a step returns its loss, too, is not to change where state lies.
        """
        unused = variables(atom for eqn in self.unused for atom in eqn.invars)
        return self.read_per_replica.union(unused)

    @cached_property
    def read_globally(self) -> frozenset[Var]:
        """Those that the others read."""
        eqns = (*self.copied, *self.global_)
        return frozenset(variables(atom for eqn in eqns for atom in eqn.invars))

    @cached_property
    def made_per_replica(self) -> frozenset[Var]:
        """Those that the replicas' equations make."""
        return frozenset(var for eqn in self.per_replica for var in eqn.outvars)

    @cached_property
    def made_globally(self) -> frozenset[Var]:
        """Those that the others make."""
        eqns = (*self.copied, *self.global_)
        return frozenset(var for eqn in eqns for var in eqn.outvars)


def partition(
    jaxpr: Jaxpr,
    varies: Callable[[Atom], bool],
    stays: Callable[[Equation], bool] = lambda eqn: False,
) -> Partition:
    """The division of a step."""
    per_replica: list[Equation] = []
    global_: list[Equation] = []
    needed: set[Var] = set()
    alive, unused = set(variables(jaxpr.outvars)), list[Equation]()
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and alive.isdisjoint(eqn.outvars):
            unused.append(eqn)
            continue
        alive.update(variables(eqn.invars))
        is_free = _is_equal(eqn, varies) and not stays(eqn)
        if is_free and needed.isdisjoint(eqn.outvars):
            global_.append(eqn)
        else:
            per_replica.append(eqn)
            needed.update(variables(eqn.invars))
    per_replica.reverse()
    global_.reverse()
    wanted = set(variables(atom for eqn in global_ for atom in eqn.invars))
    wanted.update(variables(jaxpr.outvars))
    copied = _copied(per_replica, set(jaxpr.invars), wanted, varies)
    return Partition(per_replica, global_, copied, unused)


def _is_equal(eqn: Equation, varies: Callable[[Atom], bool]) -> bool:
    """Whether it computes the same on all replicas, and does nothing besides."""
    # Collectives have an effect, the name of their axis (JAX 0.10 and 0.12).
    return not eqn.effects and not any(map(varies, (*eqn.invars, *eqn.outvars)))


def _copied(
    per_replica: Sequence[Equation],
    given: set[Var],
    wanted: set[Var],
    varies: Callable[[Atom], bool],
) -> list[Equation]:
    """The equations of the replicas that are made of arguments alone, cheaply."""
    known, light = set(given), list[Equation]()
    for eqn in per_replica:
        is_light = eqn.primitive.name not in _NOT_LIGHT and not any(
            True for _ in inner_jaxprs(eqn.params)
        )
        if (
            is_light
            and _is_equal(eqn, varies)
            and known.issuperset(variables(eqn.invars))
        ):
            light.append(eqn)
            known.update(eqn.outvars)
    return live_equations(light, wanted)
