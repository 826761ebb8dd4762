"""The equations of a step that need not run on each replica: `Cut`.

After the last reduction everything is equal on all replicas. What is equal, and is
needed by nothing that differs, is computed once for all, outside of the `shard_map`,
where XLA divides it over the devices. Y. Xu et al. Automatic cross-replica sharding of
weight update in data-parallel training. arXiv:2004.13336 (2020).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import final

from jax.extend.core import DropVar, Literal

from jaxstrategy.tracing._jaxpr_types import Atom, Equation, Jaxpr, Var
from jaxstrategy.tracing.replication._jaxprs import inner_jaxprs

# They take about as long as reading what they read, which the other side has, too.
_NOT_LIGHT = frozenset(("dot_general", "conv_general_dilated", "sort", "fft"))


@final
@dataclasses.dataclass(frozen=True)
class Cut:
    """A step, divided into what each replica computes and what is computed once.

    Attributes:
      inside: the equations of each replica, in order.
      outside: those that follow, in order.
      copied: those of the replicas whose results both sides compute, rather than hand
        them over: they are cheap, and made of arguments.
      unused: those that nobody needs, such as a loss of which the gradient alone is
        taken. Nothing is gathered for them.
    """

    inside: Sequence[Equation]
    outside: Sequence[Equation]
    copied: Sequence[Equation]
    unused: Sequence[Equation]

    @cached_property
    def read_inside(self) -> frozenset[Var]:
        """The variables that the replicas' equations read."""
        return frozenset(_vars(atom for eqn in self.inside for atom in eqn.invars))

    @cached_property
    def read_by_users(self) -> frozenset[Var]:
        """The variables that the replicas' part of the user's step mentions.

        Whether a step returns its loss, too, is not to change where state lies.
        """
        unused = _vars(atom for eqn in self.unused for atom in eqn.invars)
        return self.read_inside.union(unused)

    @cached_property
    def read_outside(self) -> frozenset[Var]:
        """Those that the others read."""
        eqns = (*self.copied, *self.outside)
        return frozenset(_vars(atom for eqn in eqns for atom in eqn.invars))

    @cached_property
    def made_inside(self) -> frozenset[Var]:
        """Those that the replicas' equations make."""
        return frozenset(var for eqn in self.inside for var in eqn.outvars)

    @cached_property
    def made_outside(self) -> frozenset[Var]:
        """Those that the others make."""
        eqns = (*self.copied, *self.outside)
        return frozenset(var for eqn in eqns for var in eqn.outvars)


def cut(
    jaxpr: Jaxpr,
    varies: Callable[[Atom], bool],
    stays: Callable[[Equation], bool] = lambda eqn: False,
) -> Cut:
    """The division of a step.

    Args:
      jaxpr: flat, of one replica.
      varies: whether a value may differ between replicas.
      stays: whether an equation is for the replicas anyway.
    """
    inside: list[Equation] = []
    outside: list[Equation] = []
    needed: set[Var] = set()
    alive, unused = set(_vars(jaxpr.outvars)), list[Equation]()
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and alive.isdisjoint(eqn.outvars):
            unused.append(eqn)
            continue
        alive.update(_vars(eqn.invars))
        is_free = _is_equal(eqn, varies) and not stays(eqn)
        if is_free and needed.isdisjoint(eqn.outvars):
            outside.append(eqn)
        else:
            inside.append(eqn)
            needed.update(_vars(eqn.invars))
    inside.reverse()
    outside.reverse()
    wanted = set(_vars(atom for eqn in outside for atom in eqn.invars))
    wanted.update(_vars(jaxpr.outvars))
    copied = _copied(inside, set(jaxpr.invars), wanted, varies)
    return Cut(inside, outside, copied, unused)


def _is_equal(eqn: Equation, varies: Callable[[Atom], bool]) -> bool:
    """Whether it computes the same on all replicas, and does nothing besides."""
    # Collectives have an effect, the name of their axis (JAX 0.10 and 0.12).
    return not eqn.effects and not any(map(varies, (*eqn.invars, *eqn.outvars)))


def _copied(
    inside: Sequence[Equation],
    given: set[Var],
    wanted: set[Var],
    varies: Callable[[Atom], bool],
) -> list[Equation]:
    """The equations of the replicas that are made of arguments alone, cheaply."""
    known, light = set(given), list[Equation]()
    for eqn in inside:
        is_light = eqn.primitive.name not in _NOT_LIGHT and not any(
            True for _ in inner_jaxprs(eqn.params)
        )
        if is_light and _is_equal(eqn, varies) and known.issuperset(_vars(eqn.invars)):
            light.append(eqn)
            known.update(eqn.outvars)
    return _for_these(light, wanted)


def _for_these(eqns: Sequence[Equation], wanted: set[Var]) -> list[Equation]:
    """Those of the equations that some variables need."""
    needed, found = set(wanted), list[Equation]()
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            found.append(eqn)
            needed.update(_vars(eqn.invars))
    return found[::-1]


def _vars(atoms: Iterable[Atom]) -> Iterable[Var]:
    return (atom for atom in atoms if not isinstance(atom, Literal | DropVar))
