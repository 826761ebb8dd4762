"""The tables of which a function uses some rows only: `tables_of`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import final

from jax.extend.core import Literal

from jaxstrategy.scheduled._function_trace import (
    FunctionTrace,
    name_in_trace,
)
from jaxstrategy.scheduled._recorder import PREFIX
from jaxstrategy.scheduled._traced_operations import (
    READ,
    TracedOperation,
    TracedOperations,
)
from jaxstrategy.tracing._jaxpr_types import Atom, Equation, Var
from jaxstrategy.tracing.replication._jaxprs import hidden


@final
@dataclasses.dataclass(frozen=True)
class TracedTable:
    """A table of which a function uses some rows.

    Attributes:
      shards: the inputs of the trace that are its shards.
      uses: the reads and changes of rows of it, in their order.
    """

    shards: tuple[int, ...]
    uses: Sequence[TracedOperation]


@final
@dataclasses.dataclass(frozen=True)
class TracedTables:
    """The tables of a function.

    Attributes:
      tables: those of which only rows are needed.
      whole: those of which it looks rows up, and yet needs all: the shards of each, and
        why; None if it uses all of it elsewhere.
    """

    tables: Sequence[TracedTable]
    whole: dict[tuple[int, ...], str | None]


def tables_of(trace: FunctionTrace, operations: TracedOperations) -> TracedTables:
    """The tables of a function, and of which of them rows are enough."""
    uses: dict[tuple[int, ...], list[TracedOperation]] = {}
    for each in operations.operations:
        if each.is_of_rows:
            uses.setdefault(each.variables, []).append(each)
    whole = dict(_also_whole(trace, operations, uses))
    while True:
        left = {shards: uses[shards] for shards in uses if shards not in whole}
        late = _with_late_ids(trace, left)
        if late is None:
            break
        whole[late] = "asks for rows whose numbers depend on rows that it has read"
    tables = [TracedTable(shards, each) for shards, each in left.items()]
    return TracedTables(tables, whole)


def _also_whole(
    trace: FunctionTrace,
    operations: TracedOperations,
    uses: dict[tuple[int, ...], list[TracedOperation]],
) -> Iterator[tuple[tuple[int, ...], str | None]]:
    """Tables that something else uses, too, than reads and changes of their rows."""
    known = {id(each.eqn): each for each in operations.operations}
    read: set[int] = set()
    changed: set[int] = set()  # by what says nothing of rows
    for eqn in trace.jaxpr.eqns:
        operation = known.get(id(eqn))
        atoms = eqn.invars if operation is None else operation.operands
        read |= {i for v in atoms if (i := _version(v, operations)) is not None}
        if operation is None:
            continue
        if not operation.is_of_rows:
            changed.update(operation.variables)
        elif operation.name == READ:
            read |= changed.intersection(operation.variables)
    results = trace.jaxpr.outvars[: len(trace.varies)]
    read |= {i for v in results if (i := _version(v, operations)) is not None}
    for shards in uses:
        others = {i for other in uses if other != shards for i in other}
        if not operations.whole.issuperset(shards):
            yield shards, "changes rows in a branch or a loop"
        elif read.intersection(shards) or others.intersection(shards):
            yield shards, None


def _version(atom: Atom, operations: TracedOperations) -> int | None:
    return None if isinstance(atom, Literal) else operations.versions.get(atom)


def _with_late_ids(
    trace: FunctionTrace, tables: dict[tuple[int, ...], list[TracedOperation]]
) -> tuple[int, ...] | None:
    """A table whose rows are known only when others have been read."""
    by_eqn = {id(use.eqn): use for uses in tables.values() for use in uses}
    late: set[Var] = set()
    for eqn in trace.jaxpr.eqns:
        use = by_eqn.get(id(eqn))
        if use is not None and _is_late(use.operands[:1], late):
            return use.variables
        if use is not None and use.name == READ:
            late.update(eqn.outvars)
        elif use is None and _is_late(eqn.invars, late):
            late.update(eqn.outvars)
    return None


def _is_late(atoms: Sequence[Atom], late: set[Var]) -> bool:
    return any(not isinstance(atom, Literal) and atom in late for atom in atoms)


def stand_ins_inside(trace: FunctionTrace) -> Iterator[Equation]:
    """Equations at the top level that hold stand-ins for what the worker has."""
    for eqn in trace.jaxpr.eqns:
        if name_in_trace(eqn).startswith(PREFIX):
            continue
        if any(name_in_trace(each).startswith(PREFIX) for each in hidden(eqn.params)):
            yield eqn
