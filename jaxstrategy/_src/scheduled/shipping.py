"""A traced function as a worker gets it: programs, tables and changes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pickle
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from jaxstrategy._src.replicas.replica_placements import (
    SAME,
    SPLIT,
    Meaning,
)
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.scheduled.trace import PREFIX, FunctionTrace, name_in_trace
from jaxstrategy._src.text import user_code
from jaxstrategy._src.tracing.jaxprs.visit import (
    ArrayType,
    Atom,
    Equation,
    Jaxpr,
    Var,
    closed,
    hidden,
    jaxpr_of,
)
from jaxstrategy._src.tracing.on_replicas import on_replicas
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.values.arrays import Function, Leaf
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables.changes import SCATTERS, changed
from jaxstrategy._src.variables.kinds.per_worker_kind import per_worker_kind_of
from jaxstrategy._src.variables.kinds.server_kind import (
    PREFIX as SERVER_PREFIX,
    ExportedUpdate,
    ServerKind,
    exported_update,
    server_kind_of,
)
from jaxstrategy._src.variables.variable import Variable

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
        if not name.startswith(SERVER_PREFIX):
            continue
        operation = _operation(name.removeprefix(SERVER_PREFIX), eqn, current)
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
    if any(isinstance(atom.aval, AbstractRef) for atom in eqn.invars):
        return True
    return any(not hasattr(effect, "name") for effect in effects)


_Values: TypeAlias = dict[Var, Any]
Final: TypeAlias = int
"""A result of a program that is what a variable's input ends as."""


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

    def rows(self, table: int) -> int:
        """How many rows of a table all its lookups together name, of all replicas."""
        uses = self._tables[table].uses
        ids = sum(use.operands[0].aval.size for use in uses)
        return ids * self._replicas.count

    def program(
        self,
        results: Sequence[Atom],
        returned: Sequence[Meaning],
        finals: Sequence[Final] = (),
        keeps_effects: bool = False,
    ) -> tuple[Function, list[Input], list[Meaning], list[jax.ShapeDtypeStruct]]:
        """The function of all replicas that computes some values of the trace."""
        trace = self._trace
        eqns, vars_ = needed(trace.jaxpr, results, keeps_effects, self._operands)
        vars_ |= {trace.jaxpr.invars[i] for i in finals}
        taken = list(self._taken(eqns, vars_))
        run = list(_in_runs(eqns, self._is_special, results))

        def replica(*given: Leaf) -> list[jax.Array]:
            values = self._beginning(vars_)
            inputs = dict(zip((each for each, _, _, _ in taken), given, strict=True))
            for (each, var, lies, _), value in zip(taken, given, strict=True):
                if var is not None:
                    values[var] = _held(var, self._with_keys(each, value))
                elif lies is SPLIT:
                    inputs[each] = jax.lax.squeeze(value, (0,))
            for one in run:
                self._evaluate(one, values, inputs)
            made = [_read(values, atom) for atom in results]
            made += [values[trace.jaxpr.invars[i]][...] for i in finals]
            lies = [*returned, *(SAME for _ in finals)]
            return [
                jax.lax.expand_dims(array, (0,)) if each is SPLIT else array
                for array, each in zip(made, lies, strict=True)
            ]

        meanings = [lies for _, _, lies, _ in taken]
        types = [of_type for *_, of_type in taken]
        out = [*returned, *(SAME for _ in finals)]
        function = on_replicas(replica, self._replicas, meanings, out)
        return function, [each for each, *_ in taken], meanings, types

    def _operands(self, eqn: Equation) -> Sequence[Atom]:
        """What an equation needs: the rows of a table come from elsewhere."""
        name = name_in_trace(eqn)
        if name.startswith(PREFIX):
            return ()
        use = self._uses.get(id(eqn))
        if use is None:
            return eqn.invars
        # The shards stay: a change of them must be made before what is read then.
        return eqn.invars[1:]

    def _is_special(self, eqn: Equation) -> bool:
        return id(eqn) in self._uses or name_in_trace(eqn).startswith(PREFIX)

    def _taken(
        self, eqns: Sequence[Equation], vars_: set[Var]
    ) -> Iterator[tuple[Input, Var | None, Meaning, jax.ShapeDtypeStruct]]:
        """The inputs that some equations need: from where, as which variable."""
        trace = self._trace
        for index, var in enumerate(trace.jaxpr.invars):
            if var not in vars_ or index in trace.constants or index in self._shards:
                continue
            argument, variable = trace.arguments[index], trace.variables.get(index)
            if argument is not None:
                of_type = self._type(var, trace.meanings[index])
                yield (
                    Input("argument", argument),
                    var,
                    trace.meanings[index],
                    of_type,
                )
            elif (kind := per_worker_kind_of(variable)) is not None:
                number = kind.resource.number
                yield Input("own", number), var, SAME, self._type(var, SAME)
            elif server_kind_of(variable) is not None:
                number = getattr(variable, "cell").number  # noqa: B009
                yield Input("variable", number), var, SAME, self._type(var, SAME)
        for number, table in enumerate(self._tables):
            if any(self._uses.get(id(eqn), (-1,))[0] == number for eqn in eqns):
                first: ArrayType = trace.jaxpr.invars[table.shards[0]].aval
                shape = (self.rows(number), *first.shape[1:])
                of_type = jax.ShapeDtypeStruct(shape, first.dtype)
                yield (
                    Input("table", number),
                    trace.jaxpr.invars[table.shards[0]],
                    SAME,
                    of_type,
                )
        for eqn in eqns:
            yield from self._asked_for(eqn)

    def _asked_for(
        self, eqn: Equation
    ) -> Iterator[tuple[Input, Var | None, Meaning, jax.ShapeDtypeStruct]]:
        use, name = self._uses.get(id(eqn)), name_in_trace(eqn)
        if use is not None:
            _, lookup, operation = use
            ids = operation.operands[0].aval
            shape = (self._replicas.count, *ids.shape)
            of_type = jax.ShapeDtypeStruct(shape, "int32")
            yield Input("positions", lookup), None, SPLIT, of_type
        elif name.startswith(PREFIX):
            number = int(name.removeprefix(PREFIX))
            recorder, aval = self._trace.recorder, eqn.outvars[0].aval
            lies = SPLIT if recorder.split[number] else SAME
            shape = (self._replicas.count,) * (lies is SPLIT) + aval.shape
            yield (
                recorder.inputs[number],
                None,
                lies,
                jax.ShapeDtypeStruct(shape, aval.dtype),
            )

    def _with_keys(self, given: Input, value: jax.Array) -> jax.Array:
        """An argument as the trace knows it, which a worker has as numbers."""
        is_argument = given.kind == "argument"
        how = self._trace.keys.get(given.number) if is_argument else None
        return value if how is None else jax.random.wrap_key_data(value, impl=how)

    def _type(self, var: Var, lies: Meaning) -> jax.ShapeDtypeStruct:
        aval = getattr(var.aval, "inner_aval", var.aval)
        shape = aval.shape
        if lies is SPLIT:
            shape = (self._replicas.count, *shape[1:])
        of_type = jax.ShapeDtypeStruct(shape, aval.dtype)
        return jax.eval_shape(as_numbers, of_type)

    def _beginning(self, vars_: set[Var]) -> _Values:
        """What is known when the function begins: constants, and nothing added yet."""
        trace = self._trace
        values: _Values = {}
        for index, var in enumerate(trace.jaxpr.invars):
            if var not in vars_:
                continue
            variable = trace.variables.get(index)
            if index in trace.constants:
                values[var] = trace.constants[index]
            elif variable is not None and _is_pending(variable):
                values[var] = _held(var, variable.value())
        return values

    def _evaluate(
        self,
        one: Equation | _Run,
        values: _Values,
        inputs: Mapping[Input, jax.Array],
    ) -> None:
        if isinstance(one, _Run):
            made = one([values[var] for var in one.invars])
            values.update(zip(one.outvars, made, strict=True))
            return
        name, use = name_in_trace(one), self._uses.get(id(one))
        if use is None:
            number = int(name.removeprefix(PREFIX))
            values[one.outvars[0]] = inputs[self._trace.recorder.inputs[number]]
            return
        number, lookup, operation = use
        positions = inputs[Input("positions", lookup)]
        if operation.name == READ:
            table = values[one.invars[1]]
            values[one.outvars[0]] = table[positions]
            return
        change = SCATTERS[operation.name.removeprefix("scatter_")].operation
        given = _read(values, one.invars[1])
        table = values[one.invars[2]]
        values[one.outvars[0]] = changed(table, positions, given, change)


def _is_pending(variable: Handle) -> bool:
    """Whether it is no variable, but what a function counts up beside one."""
    return server_kind_of(variable) is None and per_worker_kind_of(variable) is None


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
        self._call: Callable[..., Any] = core.jaxpr_as_fun(closed(jaxpr))

    def __call__(self, given: Sequence[Leaf]) -> Sequence[Leaf]:
        return self._call(*given)


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
    return _Shipping(trace, replicas, pool, as_code).program(platforms, iterators)


@final
class _Shipping:
    def __init__(
        self,
        trace: FunctionTrace,
        replicas: Replicas,
        pool: ServerPool,
        as_code: AsCode | None,
    ) -> None:
        _check_stand_ins(trace)
        self._as_code = as_code
        self._trace = trace
        self._replicas = replicas
        self._pool = pool
        self._operations: TracedOperations = operations_of(trace)
        self._found: TracedTables = tables_of(trace, self._operations)
        _warn_of_whole_tables(trace, self._found)
        self._parts = FunctionParts(trace, self._found.tables, replicas)
        self._outputs: list[Atom] = list(trace.jaxpr.outvars[: len(trace.varies)])
        self._finals: list[int] = []
        self._updates: dict[tuple[int, str], ExportedUpdate] = {}

    def program(
        self, platforms: Sequence[str], iterators: Sequence[Sequence[ElementType]]
    ) -> ShippedProgram:
        """All of it."""
        varies = [SPLIT if differs else SAME for differs in self._trace.varies]
        pushes = tuple(self._pushes())
        own = tuple(self._own())
        meanings = [*varies, *(SAME for _ in self._outputs[len(varies) :])]
        function, inputs, lies, types = self._parts.program(
            self._outputs, meanings, self._finals, keeps_effects=True
        )
        returned = [*meanings, *(SAME for _ in self._finals)]
        compiled = self._compiled(function, lies, returned)
        main_inputs = len(inputs)
        compiled_ids, types_of_ids, ids_inputs = self._ids(inputs)
        main: bytes | AbstractHostCode
        ids: bytes | None = None
        if self._as_code is not None:
            main = self._as_code(compiled, compiled_ids)
        else:
            main = _exported(compiled, types, platforms)
            if compiled_ids is not None:
                ids = _exported(compiled_ids, types_of_ids, platforms)
        made = ShippedProgram(
            key="",
            name=self._trace.name,
            main=main,
            inputs=tuple(inputs),
            main_inputs=main_inputs,
            ids=ids,
            ids_inputs=ids_inputs,
            tables=tuple(self._tables()),
            results=len(varies),
            own=self._own_numbered(own),
            pushes=self._numbered(pushes),
            iterators=tuple(map(tuple, iterators)),
            updates=tuple(
                (server, key, each.exported)
                for (server, key), each in self._updates.items()
            ),
            homes=self._homes(inputs, pushes),
            replicas=self._replicas.count,
        )
        if self._as_code is not None:
            return dataclasses.replace(made, key=secrets.token_hex(32))
        key = hashlib.sha256(pickle.dumps(made)).hexdigest()
        return dataclasses.replace(made, key=key)

    def _ids(
        self, inputs: list[Input]
    ) -> tuple[Wrapped | None, list[jax.ShapeDtypeStruct], tuple[int, ...]]:
        """The program of ids, of some inputs of the main program; more are added."""
        lookups = self._parts.lookups()
        if not lookups:
            return None, [], ()
        meanings = [SPLIT for _ in lookups]
        function, taken, lies, types = self._parts.program(lookups, meanings)
        inputs += [each for each in taken if each not in inputs]
        compiled = self._compiled(function, lies, meanings)
        return compiled, types, tuple(inputs.index(each) for each in taken)

    def _compiled(
        self, function: Function, lies: Sequence[Meaning], returned: Sequence[Meaning]
    ) -> Wrapped:
        place = self._replicas.sharding
        return jax.jit(
            function,
            in_shardings=tuple(map(place, lies)),
            out_shardings=list(map(place, returned)),
        )

    def _tables(self) -> Iterator[ShippedTable]:
        first = 0
        for number, table in enumerate(self._found.tables):
            aval = self._type(table.shards[0])
            last = first + len(table.uses)
            yield ShippedTable(
                shards=tuple(self._number(i) for i in table.shards),
                starts=self._starts(table.shards),
                lookups=tuple(range(first, last)),
                rows=self._parts.rows(number),
                row=tuple(aval.shape[1:]),
                dtype=str(aval.dtype),
            )
            first = last

    def _starts(self, shards: Sequence[int]) -> tuple[int, ...]:
        starts = [0]
        for index in shards:
            starts.append(starts[-1] + self._type(index).shape[0])
        return tuple(starts)

    def _type(self, index: int) -> ArrayType:
        return self._trace.jaxpr.invars[index].aval

    def _number(self, index: int) -> int:
        return _server_variable(self._trace.variables[index]).number

    # What is pushed.

    def _pushes(self) -> Iterator[Push]:
        by_eqn = {
            id(use.eqn): number
            for number, use in enumerate(
                use for table in self._found.tables for use in table.uses
            )
        }
        for each in self._operations.changes():
            yield self._push(each, by_eqn.get(id(each.eqn)))
        for index, kind, methods in self._counted():
            yield from self._sums(index, kind, methods)

    def _push(self, operation: TracedOperation, lookup: int | None) -> Push:
        operands = operation.operands if lookup is None else operation.operands[1:]
        numbers = tuple(self._number(i) for i in operation.variables)
        program = ""
        if operation.name == "update":
            server = self._pool.home(numbers[0])
            update = _update_of(operation)
            self._updates[server, update.key] = update
            # Here, as the servers must have it before any worker asks for it.
            self._pool.define(server, update)
            program = update.key
        starts = self._starts(operation.variables) if operation.is_of_rows else ()
        outputs = tuple(self._output(atom) for atom in operands)
        return Push(operation.name, numbers, outputs, lookup, starts, program=program)

    def _output(self, atom: Atom) -> int:
        self._outputs.append(atom)
        return len(self._outputs) - 1

    def _own(self) -> Iterator[tuple[int, int]]:
        """The worker's own variables that change, with what they become."""
        jaxpr, finals = self._trace.jaxpr, self._trace.finals
        for index, variable in self._trace.variables.items():
            kind, var = per_worker_kind_of(variable), jaxpr.invars[index]
            if kind is None or (
                index in finals and jaxpr.outvars[finals[index]] is var
            ):
                continue
            if index in finals or any(var in eqn.invars for eqn in jaxpr.eqns):
                yield kind.resource.number, self._final(index)

    def _counted(self) -> Iterator[tuple[int, ServerKind, set[str]]]:
        """The variables that change in branches or loops, and the methods used."""
        changes = self._trace.recorder.changes
        for index, variable in self._trace.variables.items():
            kind = server_kind_of(variable)
            methods = set() if kind is None else changes.get(kind.added, set())
            if kind is None or not methods or index in self._operations.whole:
                continue
            self._check_counted(kind, index, methods)
            yield index, kind, methods

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

    def _final(self, index: int) -> int:
        """The output that says what an input ends as; negative: of a reference."""
        if index in self._trace.finals:
            return self._output(self._trace.jaxpr.outvars[self._trace.finals[index]])
        self._finals.append(index)
        return -len(self._finals)

    def _numbered(self, pushes: Sequence[Push]) -> tuple[Push, ...]:
        """With the numbers of outputs that are known only now: references come last."""
        return tuple(
            dataclasses.replace(
                push,
                operands=tuple(map(self._number_of_output, push.operands)),
                flag=None if push.flag is None else self._number_of_output(push.flag),
            )
            for push in pushes
        )

    def _own_numbered(
        self, own: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, int], ...]:
        return tuple((each, self._number_of_output(output)) for each, output in own)

    def _number_of_output(self, output: int) -> int:
        return output if output >= 0 else len(self._outputs) - output - 1

    def _homes(
        self, inputs: Sequence[Input], pushes: Sequence[Push]
    ) -> tuple[tuple[int, int], ...]:
        numbers = {each.number for each in inputs if each.kind == "variable"}
        numbers.update(i for table in self._tables() for i in table.shards)
        numbers.update(i for push in pushes for i in push.variables)
        return tuple((number, self._pool.home(number)) for number in sorted(numbers))


def _server_variable(variable: object) -> Any:
    assert isinstance(variable, Variable)
    return variable.cell


def _update_of(operation: TracedOperation) -> ExportedUpdate:
    called: Any = operation.eqn.params["jaxpr"]
    types = [
        jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
        for atom in operation.eqn.invars
    ]
    return exported_update(core.jaxpr_as_fun(called), types)


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


def _warn_of_whole_tables(trace: FunctionTrace, tables: TracedTables) -> None:
    for shards, why in tables.whole.items():
        if why is not None:
            name = trace.variables[shards[0]].name
            user_code.warn(
                f"`{trace.name}` {why}, of variable {name!r}. So all of it is sent to "
                "the worker for each call. Where that is much, look the rows up at the "
                "top level of the function, by numbers that it is given or computes.",
                WholeTableWarning,
            )


def _check_stand_ins(trace: FunctionTrace) -> None:
    for eqn in stand_ins_inside(trace):
        line = Site((eqn,)).line or "unknown"
        raise ValueError(
            f"`{trace.name}` takes an element of an iterator in a branch or a loop, "
            "which is traced once: each turn would see the same element.\n"
            f"  the {eqn.primitive.name}: {line}\n"
            "Take the elements before it, and stack them: `jax.lax.scan` goes through "
            "the first dimension."
        )
