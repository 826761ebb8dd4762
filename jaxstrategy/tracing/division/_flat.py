"""A jaxpr without the calls at its top level: `flattened`.

A reduction inside a jitted function could not be where the step is divided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

from jax.extend import core
from jax.extend.core import DropVar, Literal

from jaxstrategy.tracing._jaxpr_types import Atom, ClosedJaxpr, Equation, Jaxpr, Var
from jaxstrategy.tracing.division._functions_of_parts import (
    AROUND_FUNCTIONS,
    is_around_function,
    shard_function,
)
from jaxstrategy.tracing.replication._jaxprs import all_eqns, jaxpr_of, plain
from jaxstrategy.values._types import Leaf

_Names: TypeAlias = dict[Var, Atom]
# What calls a function once, and does nothing else. A function with a rule of its own
# for derivatives stays: somebody may differentiate the program. So does `checkpoint`,
# which keeps XLA from joining what is computed twice on purpose.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}


@final
@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr without calls.

    Attributes:
      jaxpr: it; the constants of the functions that were called are further inputs.
      constants: these.
      calls: of results of equations of such functions, the equations that call them,
        the innermost first.
    """

    jaxpr: Jaxpr
    constants: list[Leaf]
    calls: Mapping[Var, tuple[Equation, ...]]


def flattened(
    jaxpr: Jaxpr, stays: Callable[[Equation], bool] = lambda _: False
) -> Flat:
    """`jaxpr` with the equations of the functions that it calls in place of the calls.

    Calls of functions that can be computed from parts stay as they are.

    Args:
      jaxpr: without constants.
      stays: of which other calls this is so.
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
        """Add equations, in which `names` stand for some variables.

        Args:
          eqns: of a jaxpr.
          names: what its variables are called; added to.
          calls: the equations that call the jaxpr, the innermost first. If there are
            any, its own variables need new names: it may be called twice.
        """
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
