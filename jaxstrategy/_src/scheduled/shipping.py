"""A traced function as a worker gets it: programs, tables and changes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pickle
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
from jax.extend import core
from jax.extend.core import DropVar, Literal
from jax.ref import AbstractRef
from jax.stages import Wrapped

from jaxstrategy._src.errors import MissingExtraError, WholeTableWarning
from jaxstrategy._src.parameter_servers.protocol import (
    AbstractHostCode,
    ElementType,
    Input,
    Push,
    ServerPool,
    ShippedProgram,
    ShippedTable,
)
from jaxstrategy._src.replicas.mesh import (
    as_numbers,
)
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    ReplicaLayout,
    Replicas,
)
from jaxstrategy._src.scheduled.trace import PREFIX, FunctionTrace, name_in_trace
from jaxstrategy._src.text import user_code
from jaxstrategy._src.tracing.jaxprs.visit import (
    ArrayType,
    Atom,
    Equation,
    Jaxpr,
    Var,
    closed,
    inner_eqns,
    jaxpr_of,
)
from jaxstrategy._src.tracing.on_replicas import on_replicas
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.values.arrays import Leaf
from jaxstrategy._src.variables.changes import SCATTERS, changed
from jaxstrategy._src.variables.remote_kinds import (
    PREFIX as SERVER_PREFIX,
    ServerKind,
    exported_update,
    per_worker_kind_of,
    server_kind_of,
)

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

    def held(self, atoms: Iterable[Atom]) -> set[int]:
        """The inputs of which some atoms are what they held at some point."""
        return {self.versions[atom] for atom in variables_in(atoms, self.versions)}


def variables_in(atoms: Iterable[Atom], known: Container[Var]) -> list[Var]:
    """Those atoms that are among some variables of a trace."""
    return [a for a in atoms if not isinstance(a, Literal) and a in known]


def operations_of(trace: FunctionTrace) -> TracedOperations:
    """The operations by which a trace changes its variables."""
    jaxpr = trace.jaxpr
    current: dict[Var, int] = {jaxpr.invars[i]: i for i in trace.finals}
    versions = dict(current)
    found: list[TracedOperation] = []
    for eqn in jaxpr.eqns:
        operation = _operation(eqn, current)
        if operation is None:
            continue
        found.append(operation)
        if operation.name == READ:
            continue
        for var in [var for var, i in current.items() if i in operation.variables]:
            del current[var]
        for var, index in zip(eqn.outvars, operation.variables, strict=True):
            current[var] = versions[var] = index
    ends = {index: jaxpr.outvars[result] for index, result in trace.finals.items()}
    whole = [
        index
        for index, atom in ends.items()
        if any(current[var] == index for var in variables_in([atom], current))
    ]
    return TracedOperations(found, versions, frozenset(whole))


def _operation(eqn: Equation, current: dict[Var, int]) -> TracedOperation | None:
    """What an equation does to what variables hold then; None to something else."""
    marked = name_in_trace(eqn)
    if not marked.startswith(SERVER_PREFIX):
        return None
    name, _, count = marked.removeprefix(SERVER_PREFIX).partition("_of_")
    if name == READ:
        first, last = 1, len(eqn.invars)
    elif name.startswith("scatter_"):
        first, last = 2, len(eqn.invars)
    else:
        first, last = 0, int(count or 1)
    variables = tuple(current[v] for v in variables_in(eqn.invars[first:last], current))
    if len(set(variables)) < last - first:
        return None
    operands = (*eqn.invars[:first], *eqn.invars[last:])
    return TracedOperation(name, variables, operands, eqn)


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


def tables_of(trace: FunctionTrace, operations: TracedOperations) -> list[TracedTable]:
    """The tables of a function of which rows are enough."""
    uses: dict[tuple[int, ...], list[TracedOperation]] = {}
    for each in operations.operations:
        if each.is_of_rows:
            uses.setdefault(each.variables, []).append(each)
    for shards, why in list(_also_whole(trace, operations, uses)):
        del uses[shards]
        if why is not None:
            _warn_of_whole_table(trace, shards, why)
    while (late := _with_late_ids(trace, uses)) is not None:
        del uses[late]
        why = "asks for rows whose numbers depend on rows that it has read"
        _warn_of_whole_table(trace, late, why)
    return [TracedTable(shards, each) for shards, each in uses.items()]


def _also_whole(
    trace: FunctionTrace,
    operations: TracedOperations,
    uses: dict[tuple[int, ...], list[TracedOperation]],
) -> Iterator[tuple[tuple[int, ...], str | None]]:
    """Tables that something else uses, too, than reads and changes of their rows."""
    known = {id(each.eqn): each for each in operations.operations}
    read = operations.held(trace.jaxpr.outvars[: len(trace.varies)])
    changed: set[int] = set()  # by what says nothing of rows
    for eqn in trace.jaxpr.eqns:
        operation = known.get(id(eqn))
        if operation is None:
            read |= operations.held(eqn.invars)
            continue
        read |= operations.held(operation.operands)
        if not operation.is_of_rows:
            changed.update(operation.variables)
        elif operation.name == READ:
            read |= changed.intersection(operation.variables)
    for shards in uses:
        others = {i for other in uses if other != shards for i in other}
        if not operations.whole.issuperset(shards):
            yield shards, "changes rows in a branch or a loop"
        elif read.intersection(shards) or others.intersection(shards):
            yield shards, None


def _with_late_ids(
    trace: FunctionTrace, tables: dict[tuple[int, ...], list[TracedOperation]]
) -> tuple[int, ...] | None:
    """A table whose rows are known only when others have been read."""
    by_eqn = {id(use.eqn): use for uses in tables.values() for use in uses}
    late: set[Var] = set()
    for eqn in trace.jaxpr.eqns:
        use = by_eqn.get(id(eqn))
        is_late = variables_in(eqn.invars if use is None else use.operands[:1], late)
        if use is not None and is_late:
            return use.variables
        if is_late or (use is not None and use.name == READ):
            late.update(eqn.outvars)
    return None


def _warn_of_whole_table(
    trace: FunctionTrace, shards: tuple[int, ...], why: str
) -> None:
    user_code.warn(
        f"`{trace.name}` {why}, of variable {trace.variables[shards[0]].name!r}. So "
        "all of it is sent to the worker for each call. Where that is much, look the "
        "rows up at the top level of the function, by numbers that it is given or "
        "computes.",
        WholeTableWarning,
    )


def needed(
    jaxpr: Jaxpr,
    results: Iterable[Atom],
    keeps_effects: bool,
    operands: Callable[[Equation], Sequence[Atom]],
) -> tuple[list[Equation], set[Var]]:
    """The equations that lead to some atoms, and the inputs that these need."""
    wanted = {atom for atom in results if not isinstance(atom, Literal)}
    kept: list[Equation] = []
    for eqn in reversed(jaxpr.eqns):
        is_wanted = any(var in wanted for var in eqn.outvars)
        if is_wanted or (keeps_effects and _has_effects(eqn)):
            kept.append(eqn)
            wanted.update(
                atom for atom in operands(eqn) if not isinstance(atom, Literal)
            )
    return kept[::-1], wanted.intersection(jaxpr.invars)


def _has_effects(eqn: Equation) -> bool:
    """Whether it does something besides; the names of axes count as effects to JAX."""
    effects: Any = eqn.effects
    changes = any(isinstance(atom.aval, AbstractRef) for atom in eqn.invars)
    return changes or any(not hasattr(effect, "name") for effect in effects)


_Values: TypeAlias = dict[Var, Any]
Output: TypeAlias = Atom | int
"""A result of a program: of the trace; or a number, what that input ends as."""
Taken: TypeAlias = tuple[Input, Var | None, ReplicaLayout, jax.ShapeDtypeStruct]
"""An input of a program: from where, as which variable, how it lies, its type."""


@final
class FunctionParts:
    """Programs that compute some results of a trace, from what a worker has."""

    def __init__(
        self,
        trace: FunctionTrace,
        tables: Sequence[TracedTable],
        replicas: Replicas,
    ) -> None:
        self._trace = trace
        self._replicas = replicas
        self._uses: dict[int, tuple[int, int, TracedOperation]] = {}
        count = itertools.count()
        for number, table in enumerate(tables):
            for use in table.uses:
                self._uses[id(use.eqn)] = number, next(count), use
        self._tables = tables
        self._shards = {i for table in tables for i in table.shards}

    def lookups(self) -> list[Atom]:
        """The numbers of rows that each read or change of rows names."""
        return [use.operands[0] for _, _, use in self._uses.values()]

    def lookup(self, eqn: Equation) -> int | None:
        """Which of these lookups an equation makes; None if none."""
        use = self._uses.get(id(eqn))
        return None if use is None else use[1]

    def rows(self, table: int) -> int:
        """How many rows of a table all its lookups together name, of all replicas."""
        uses = self._tables[table].uses
        ids = sum(use.operands[0].aval.size for use in uses)
        return ids * self._replicas.count

    def program(
        self,
        outputs: Sequence[Output],
        returned: Sequence[ReplicaLayout],
        keeps_effects: bool = False,
    ) -> tuple[Wrapped, list[Input], list[jax.ShapeDtypeStruct]]:
        """The function of all replicas that computes some values of the trace."""
        invars = self._trace.jaxpr.invars
        results = [each for each in outputs if not isinstance(each, int)]
        eqns, vars_ = needed(self._trace.jaxpr, results, keeps_effects, self._operands)
        vars_ |= {invars[i] for i in outputs if isinstance(i, int)}
        taken = [*self._taken(vars_), *self._stand_ins(eqns)]
        run = list(_in_runs(eqns, self._is_special, results))

        def replica(*given: Leaf) -> list[jax.Array]:
            values = self._beginning(vars_)
            inputs = dict(zip((each for each, *_ in taken), given, strict=True))
            for (each, var, layout, _), value in zip(taken, given, strict=True):
                if var is not None:
                    values[var] = _held(var, self._with_keys(each, value))
                elif layout is STACKED:
                    inputs[each] = jax.lax.squeeze(value, (0,))
            for one in run:
                self._evaluate(one, values, inputs)
            made = [
                values[invars[each]][...]
                if isinstance(each, int)
                else _read(values, each)
                for each in outputs
            ]
            return [
                jax.lax.expand_dims(array, (0,)) if layout is STACKED else array
                for array, layout in zip(made, returned, strict=True)
            ]

        layouts = [layout for _, _, layout, _ in taken]
        place = self._replicas.sharding
        jitted = jax.jit(
            on_replicas(replica, self._replicas, layouts, returned),
            in_shardings=tuple(map(place, layouts)),
            out_shardings=list(map(place, returned)),
        )
        return jitted, [each for each, *_ in taken], [type_ for *_, type_ in taken]

    def _operands(self, eqn: Equation) -> Sequence[Atom]:
        """What an equation needs: the rows of a table come from elsewhere."""
        if name_in_trace(eqn).startswith(PREFIX):
            return ()
        # The shards stay: a change of them must be made before what is read then.
        return eqn.invars[1:] if id(eqn) in self._uses else eqn.invars

    def _is_special(self, eqn: Equation) -> bool:
        return id(eqn) in self._uses or name_in_trace(eqn).startswith(PREFIX)

    def _taken(self, vars_: set[Var]) -> Iterator[Taken]:
        """The inputs that are variables of the trace."""
        trace = self._trace
        for index, var in enumerate(trace.jaxpr.invars):
            if var not in vars_ or index in trace.constants or index in self._shards:
                continue
            argument, variable = trace.arguments[index], trace.variables.get(index)
            kind = per_worker_kind_of(variable)
            if argument is not None:
                layout = trace.layouts[index]
                given = Input("argument", argument)
                yield given, var, layout, self._type(var, layout)
            elif kind is not None:
                given = Input("own", kind.resource.number)
                yield given, var, REPLICATED, self._type(var, REPLICATED)
            elif server_kind_of(variable) is not None:
                given = Input("variable", _number_of(variable))
                yield given, var, REPLICATED, self._type(var, REPLICATED)

    def _stand_ins(self, eqns: Sequence[Equation]) -> Iterator[Taken]:
        """The inputs for which something else stands in the trace."""
        trace, count = self._trace, self._replicas.count
        for number, table in enumerate(self._tables):
            if any(self._uses.get(id(eqn), (-1,))[0] == number for eqn in eqns):
                var = trace.jaxpr.invars[table.shards[0]]
                first: ArrayType = var.aval
                shape = (self.rows(number), *first.shape[1:])
                of_type = jax.ShapeDtypeStruct(shape, first.dtype)
                yield Input("table", number), var, REPLICATED, of_type
        for eqn in eqns:
            use, name = self._uses.get(id(eqn)), name_in_trace(eqn)
            if use is not None:
                _, lookup, operation = use
                shape = (count, *operation.operands[0].aval.shape)
                of_type = jax.ShapeDtypeStruct(shape, "int32")
                yield Input("positions", lookup), None, STACKED, of_type
            elif name.startswith(PREFIX):
                number = int(name.removeprefix(PREFIX))
                aval = eqn.outvars[0].aval
                layout = STACKED if trace.recorder.split[number] else REPLICATED
                shape = (count,) * (layout is STACKED) + aval.shape
                of_type = jax.ShapeDtypeStruct(shape, aval.dtype)
                yield trace.recorder.inputs[number], None, layout, of_type

    def _with_keys(self, given: Input, value: jax.Array) -> jax.Array:
        """An argument as the trace knows it, which a worker has as numbers."""
        is_argument = given.kind == "argument"
        how = self._trace.keys.get(given.number) if is_argument else None
        return value if how is None else jax.random.wrap_key_data(value, impl=how)

    def _type(self, var: Var, layout: ReplicaLayout) -> jax.ShapeDtypeStruct:
        aval = getattr(var.aval, "inner_aval", var.aval)
        shape = aval.shape
        if layout is STACKED:
            shape = (self._replicas.count, *shape[1:])
        of_type = jax.ShapeDtypeStruct(shape, aval.dtype)
        return jax.eval_shape(as_numbers, of_type)

    def _beginning(self, vars_: set[Var]) -> _Values:
        """What is known when the function begins: constants, and nothing added yet."""
        trace = self._trace
        values: _Values = {}
        for index, var in enumerate(trace.jaxpr.invars):
            variable = trace.variables.get(index)
            if var not in vars_:
                continue
            if index in trace.constants:
                values[var] = trace.constants[index]
            elif variable is not None and not (
                server_kind_of(variable) or per_worker_kind_of(variable)
            ):
                # No variable, but what a function counts up beside one.
                values[var] = _held(var, variable.value())
        return values

    def _evaluate(
        self,
        one: Equation | _Run,
        values: _Values,
        inputs: Mapping[Input, jax.Array],
    ) -> None:
        if isinstance(one, _Run):
            made = one.call(*[values[var] for var in one.invars])
            values.update(zip(one.outvars, made, strict=True))
            return
        use = self._uses.get(id(one))
        if use is None:
            number = int(name_in_trace(one).removeprefix(PREFIX))
            values[one.outvars[0]] = inputs[self._trace.recorder.inputs[number]]
            return
        _, lookup, operation = use
        positions = inputs[Input("positions", lookup)]
        if operation.name == READ:
            values[one.outvars[0]] = values[one.invars[1]][positions]
            return
        change = SCATTERS[operation.name.removeprefix("scatter_")].operation
        given, table = _read(values, one.invars[1]), values[one.invars[2]]
        values[one.outvars[0]] = changed(table, positions, given, change)


@final
class _Run:
    """Equations that follow each other, as one function."""

    def __init__(self, eqns: Sequence[Equation], wanted: set[Var]) -> None:
        made = {var for eqn in eqns for var in eqn.outvars}
        atoms = [a for eqn in eqns for a in eqn.invars if not isinstance(a, Literal)]
        self.invars = [var for var in dict.fromkeys(atoms) if var not in made]
        self.outvars = [
            var
            for eqn in eqns
            for var in eqn.outvars
            if not isinstance(var, DropVar) and var in wanted
        ]
        jaxpr = jaxpr_of(self.invars, eqns, self.outvars)
        self.call: Callable[..., Any] = core.jaxpr_as_fun(closed(jaxpr))


def _in_runs(
    eqns: Sequence[Equation],
    is_special: Callable[[Equation], bool],
    results: Sequence[Atom],
) -> Iterator[Equation | _Run]:
    """Special equations, and those between them together."""
    groups = [
        (special, list(group)) for special, group in itertools.groupby(eqns, is_special)
    ]
    wanted = {atom for atom in results if not isinstance(atom, Literal)}
    later: list[set[Var]] = []
    for _, group in reversed(groups):
        later.append(set(wanted))
        wanted |= {a for e in group for a in e.invars if not isinstance(a, Literal)}
    for (special, group), after in zip(groups, reversed(later), strict=True):
        if special:
            yield from group
        else:
            yield _Run(group, after)


def _read(values: _Values, atom: Atom) -> jax.Array:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _held(var: Var, value: Leaf) -> Leaf:
    return jax.new_ref(value) if isinstance(var.aval, AbstractRef) else value


def _number_of(variable: Any) -> int:
    """The number of a variable on the servers."""
    return variable.cell.number


AsCode: TypeAlias = Callable[[Wrapped, Wrapped | None], AbstractHostCode]
"""Makes the code of a program that has no exported form, of the main one and of ids."""
_COUNTED = {"assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub"}
"""What a function may do to a variable in branches and loops."""


def shipped(
    trace: FunctionTrace,
    replicas: Replicas,
    pool: ServerPool,
    platforms: Sequence[str],
    iterators: Sequence[Sequence[ElementType]],
    as_code: AsCode | None = None,
) -> ShippedProgram:
    """The program of a function, in the form in which it is sent."""
    _check_stand_ins(trace)
    changes = _Changes(trace, replicas, pool)
    parts, outputs = changes.parts, changes.outputs
    layouts = [STACKED if differs else REPLICATED for differs in trace.varies]
    layouts += [REPLICATED] * (len(outputs) - len(layouts))
    main, inputs, types = parts.program(outputs, layouts, keeps_effects=True)
    main_inputs = len(inputs)
    ids, ids_inputs, ids_types = None, list[Input](), list[jax.ShapeDtypeStruct]()
    if lookups := parts.lookups():
        ids, ids_inputs, ids_types = parts.program(lookups, [STACKED] * len(lookups))
        inputs += [each for each in ids_inputs if each not in inputs]
    tables = changes.tables()
    numbers = {each.number for each in inputs if each.kind == "variable"}
    numbers.update(i for table in tables for i in table.shards)
    numbers.update(i for push in changes.pushes for i in push.variables)

    def exported(program: Wrapped | None, types: Sequence[Any]) -> bytes | None:
        return None if program is None else _exported(program, types, platforms)

    made = ShippedProgram(
        key="",
        name=trace.name,
        main=as_code(main, ids) if as_code else _exported(main, types, platforms),
        inputs=tuple(inputs),
        main_inputs=main_inputs,
        ids=None if as_code else exported(ids, ids_types),
        ids_inputs=tuple(inputs.index(each) for each in ids_inputs),
        tables=tables,
        results=len(trace.varies),
        own=tuple(changes.own),
        pushes=tuple(changes.pushes),
        iterators=tuple(map(tuple, iterators)),
        homes={number: pool.home(number) for number in sorted(numbers)},
        replicas=replicas.count,
    )
    # One that has no exported form equals no other one.
    own = secrets.token_bytes(32) if as_code else pickle.dumps(made)
    return dataclasses.replace(made, key=hashlib.sha256(own).hexdigest())


@final
class _Changes:
    """What a function changes when it has ended.

    Attributes:
      parts: its programs.
      outputs: of the main one: the results, and operands of what is pushed.
      pushes: in their order.
      own: the worker's own variables that change, each with the output it becomes.
    """

    def __init__(
        self, trace: FunctionTrace, replicas: Replicas, pool: ServerPool
    ) -> None:
        self._trace = trace
        self._pool = pool
        self._operations: TracedOperations = operations_of(trace)
        self._found = tables_of(trace, self._operations)
        self.parts = FunctionParts(trace, self._found, replicas)
        self.outputs: list[Output] = list(trace.jaxpr.outvars[: len(trace.varies)])
        self.pushes = list(self._pushes())
        self.own = list(self._own())

    def tables(self) -> tuple[ShippedTable, ...]:
        """The tables of which some rows are used."""
        count = itertools.count()
        made = []
        for number, table in enumerate(self._found):
            aval = self._type(table.shards[0])
            shipped_table = ShippedTable(
                shards=tuple(map(self._number, table.shards)),
                starts=self._starts(table.shards),
                lookups=tuple(next(count) for _ in table.uses),
                rows=self.parts.rows(number),
                row=tuple(aval.shape[1:]),
                dtype=str(aval.dtype),
            )
            made.append(shipped_table)
        return tuple(made)

    def _starts(self, shards: Sequence[int]) -> tuple[int, ...]:
        rows = (self._type(index).shape[0] for index in shards)
        return tuple(itertools.accumulate(rows, initial=0))

    def _type(self, index: int) -> ArrayType:
        return self._trace.jaxpr.invars[index].aval

    def _number(self, index: int) -> int:
        return _number_of(self._trace.variables[index])

    def _output(self, output: Output) -> int:
        self.outputs.append(output)
        return len(self.outputs) - 1

    def _final(self, index: int) -> int:
        """The output that says what an input ends as."""
        finals = self._trace.finals
        is_value = index in finals
        return self._output(
            self._trace.jaxpr.outvars[finals[index]] if is_value else index
        )

    def _pushes(self) -> Iterator[Push]:
        for each in self._operations.changes():
            yield self._push(each)
        changes = self._trace.recorder.changes
        for index, variable in self._trace.variables.items():
            kind = server_kind_of(variable)
            methods = set() if kind is None else changes.get(kind.added, set())
            if kind is not None and methods and index not in self._operations.whole:
                self._check_counted(kind, index, methods)
                yield from self._sums(index, kind, methods)

    def _push(self, operation: TracedOperation) -> Push:
        lookup = self.parts.lookup(operation.eqn)
        operands = operation.operands if lookup is None else operation.operands[1:]
        numbers = tuple(map(self._number, operation.variables))
        program = ""
        if operation.name == "update":
            called: Any = operation.eqn.params["jaxpr"]
            avals = [atom.aval for atom in operation.eqn.invars]
            types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in avals]
            update = exported_update(core.jaxpr_as_fun(called), types)
            program = update.key
            # The servers must have it before any worker asks for it.
            self._pool.define(self._pool.home(numbers[0]), program, update.exported)
        starts = self._starts(operation.variables) if operation.is_of_rows else ()
        outputs = tuple(map(self._output, operands))
        return Push(operation.name, numbers, outputs, lookup, starts, program=program)

    def _own(self) -> Iterator[tuple[int, int]]:
        jaxpr, finals = self._trace.jaxpr, self._trace.finals
        for index, variable in self._trace.variables.items():
            kind, var = per_worker_kind_of(variable), jaxpr.invars[index]
            if kind is None:
                continue
            if index in finals:
                is_changed = jaxpr.outvars[finals[index]] is not var
            else:
                is_changed = any(var in eqn.invars for eqn in jaxpr.eqns)
            if is_changed:
                yield kind.resource.number, self._final(index)

    def _check_counted(self, kind: ServerKind, index: int, methods: set[str]) -> None:
        together = any(
            index in each.variables and len(each.variables) > 1
            for each in self._operations.operations
            if each.name == "update"
        )
        beyond = sorted(methods - _COUNTED)
        if beyond or together:
            name = beyond[0] if beyond else "update"
            raise ValueError(
                f"`{self._trace.name}` changes variable {kind.name!r} in a branch or a "
                f"loop, by `{name}` among others. There a function may call "
                f"{', '.join(f'`{each}`' for each in sorted(_COUNTED))} of a variable "
                "that is on a parameter server. Compute in the loop, and call "
                f"`{name}` once after it."
            )

    def _sums(self, index: int, kind: ServerKind, methods: set[str]) -> Iterator[Push]:
        """What was added in all, or what was assigned in the end."""
        number = (self._number(index),)
        inputs = {variable: i for i, variable in self._trace.variables.items()}
        flag = None
        if "assign" in methods:
            flag = self._final(inputs[kind.is_assigned])
            yield Push("set", number, (self._final(index),), flag=flag, flag_is=True)
        if methods != {"assign"}:
            added = self._final(inputs[kind.added])
            yield Push("add", number, (added,), flag=flag, flag_is=False)


def _exported(
    compiled: Wrapped,
    types: Sequence[jax.ShapeDtypeStruct],
    platforms: Sequence[str],
) -> bytes:
    export: Any = jax.export
    try:
        return bytes(export.export(compiled, platforms=platforms)(*types).serialize())
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            "Functions are sent to workers in a form that needs FlatBuffers, which "
            "is not installed. Install the extra: pip install "
            "'jaxstrategy[coordinator]'"
        ) from missing


def _check_stand_ins(trace: FunctionTrace) -> None:
    for eqn in trace.jaxpr.eqns:
        if name_in_trace(eqn).startswith(PREFIX):
            continue
        if any(
            name_in_trace(each).startswith(PREFIX) for each in inner_eqns(eqn.params)
        ):
            line = Site((eqn,)).line or "unknown"
            raise ValueError(
                f"`{trace.name}` takes an element of an iterator in a branch or a "
                "loop, which is traced once: each turn would see the same element.\n"
                f"  the {eqn.primitive.name}: {line}\n"
                "Take the elements before it, and stack them: `jax.lax.scan` goes "
                "through the first dimension."
            )
