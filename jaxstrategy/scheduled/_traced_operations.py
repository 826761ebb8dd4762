"""The changes of variables in a trace, as operations of servers: `operations_of`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final

from jax.extend.core import Literal

from jaxstrategy.scheduled._function_trace import (
    FunctionTrace,
    name_in_trace,
)
from jaxstrategy.tracing._jaxpr_types import Atom, Equation, Var
from jaxstrategy.variables._server_functions import PREFIX

READ = "rows"


@final
@dataclasses.dataclass(frozen=True)
class TracedOperation:
    """One change that a function makes at its top level.

    Attributes:
      name: of the `ServerOperation`; "rows" of a read of rows.
      variables: the inputs of the trace that it changes, or reads.
      operands: of the equation; of an operation of rows their numbers first.
      eqn: the equation.
    """

    name: str
    variables: tuple[int, ...]
    operands: tuple[Atom, ...]
    eqn: Equation

    @property
    def is_of_rows(self) -> bool:
        """Whether it reads or changes rows of a table."""
        return self.name == READ or self.name.startswith("scatter_")


@final
@dataclasses.dataclass(frozen=True)
class TracedOperations:
    """All operations of a function.

    Attributes:
      operations: in their order, reads of rows among them.
      versions: of which input a variable of the trace is what it held at some point.
      whole: the inputs whose changes these are; others change in branches or loops.
    """

    operations: Sequence[TracedOperation]
    versions: dict[Var, int]
    whole: frozenset[int]

    def changes(self) -> list[TracedOperation]:
        """Those that change something, of variables whose changes are all known."""
        return [
            each
            for each in self.operations
            if each.name != READ and self.whole.issuperset(each.variables)
        ]


def operations_of(trace: FunctionTrace) -> TracedOperations:
    """The operations by which a trace changes its variables."""
    jaxpr = trace.jaxpr
    current: dict[Var, int] = {jaxpr.invars[i]: i for i in trace.finals}
    versions = dict(current)
    found: list[TracedOperation] = []
    for eqn in jaxpr.eqns:
        name = name_in_trace(eqn)
        if not name.startswith(PREFIX):
            continue
        operation = _operation(name.removeprefix(PREFIX), eqn, current)
        if operation is None:
            continue
        found.append(operation)
        if operation.name == READ:
            continue
        for var in [var for var, i in current.items() if i in operation.variables]:
            del current[var]
        for var, index in zip(eqn.outvars, operation.variables, strict=True):
            current[var] = versions[var] = index
    whole = {
        index
        for index, result in trace.finals.items()
        if _is(jaxpr.outvars[result], index, current)
    }
    return TracedOperations(found, versions, frozenset(whole))


def _operation(
    name: str, eqn: Equation, current: dict[Var, int]
) -> TracedOperation | None:
    """What an equation does to what variables hold then; None to something else."""
    name, _, count = name.partition("_of_")
    if name == READ:
        first, last = 1, len(eqn.invars)
    elif name.startswith("scatter_"):
        first, last = 2, len(eqn.invars)
    else:
        first, last = 0, int(count or 1)
    atoms = eqn.invars[first:last]
    if not all(_is_current(atom, current) for atom in atoms):
        return None
    variables = tuple(current[atom] for atom in atoms)
    if len(set(variables)) < len(variables):
        return None
    operands = (*eqn.invars[:first], *eqn.invars[last:])
    return TracedOperation(name, variables, operands, eqn)


def _is_current(atom: Atom, current: dict[Var, int]) -> bool:
    return not isinstance(atom, Literal) and atom in current


def _is(atom: Atom, index: int, current: dict[Var, int]) -> bool:
    return _is_current(atom, current) and current[atom] == index
