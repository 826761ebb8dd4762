"""A traced function as a worker gets it: programs, tables and changes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pickle
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import jax
from jax.extend import core
from jax.ref import AbstractRef
from jax.stages import Wrapped

from jaxstrategy._src import text
from jaxstrategy._src.errors import MissingExtraError, WholeTableWarning
from jaxstrategy._src.parameter_servers.protocol import (
    ElementType,
    Input,
    Push,
    ShippedProgram,
    ShippedTable,
)
from jaxstrategy._src.parameter_servers.store import ServerPool
from jaxstrategy._src.replicas.mesh import as_numbers
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    ReplicaLayout,
)
from jaxstrategy._src.scheduled.arguments import IteratorSlot
from jaxstrategy._src.scheduled.trace import (
    PREFIX,
    FunctionTrace,
    is_ours,
    name_in_trace,
)
from jaxstrategy._src.tracing.jaxprs import (
    ArrayType,
    Atom,
    Equation,
    Var,
    all_eqns,
    function_of,
    inner_eqns,
    variables,
    with_values,
)
from jaxstrategy._src.tracing.partition.partition import inline_calls
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.tracing.trace import StepInput
from jaxstrategy._src.tracing.vmapped.replicas import on_replicas
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
Type: TypeAlias = jax.ShapeDtypeStruct
AsCode: TypeAlias = Callable[[Wrapped, Wrapped | None], Any]
"""Makes the code of a program that has no exported form, of the main one and of ids."""
_COUNTED = {"assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub"}
"""What a function may do to a variable in branches and loops."""


def shipped(
    trace: FunctionTrace,
    pool: ServerPool,
    platforms: Sequence[str],
    slots: Sequence[IteratorSlot],
    as_code: AsCode,
) -> ShippedProgram:
    """The program of a function, in the form in which it is sent."""
    names = {eqn.primitive.name for eqn in all_eqns(trace.step.jaxpr)}
    # JAX exports no program that calls Python while it runs.
    code = None if names.isdisjoint(_CALLBACKS) else as_code
    turns = trace.recorder.turns
    iterators = tuple(
        tuple(slot.type(turn).type for turn in range(turns.get(slot.number, 0)))
        for slot in slots
    )
    return _Shipment(trace, pool).shipped(platforms, iterators, code)


_CALLBACKS = (
    "pure_callback",
    "io_callback",
    "debug_callback",
    "debug_print",
    "buffer_callback",
)


def _exported(
    compiled: Wrapped, types: Sequence[Type], platforms: Sequence[str]
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


class Operation(NamedTuple):
    """A change that a function makes at its top level, or a read of rows."""

    name: str  # of the `ServerOperation`, or `READ`
    variables: tuple[Var, ...]  # the inputs of the trace that it changes, or reads
    operands: tuple[Atom, ...]  # of an operation of rows their numbers first
    eqn: Equation

    @property
    def is_of_rows(self) -> bool:
        return self.name == READ or self.name.startswith("scatter_")


_Taken: TypeAlias = tuple[Input, Var | None, ReplicaLayout, Type]
"""An input of a program: from where, as which variable, how it lies, its type."""
_Tables: TypeAlias = dict[tuple[Var, ...], list[Operation]]
"""By the inputs that are its shards, the reads and changes of a table."""


@final
class _Shipment:
    """What a worker is sent for a function, and what servers do at its end."""

    def __init__(self, trace: FunctionTrace, pool: ServerPool) -> None:
        self._trace, self._pool = trace, pool
        self._name, self._replicas = trace.step.name, trace.step.replicas
        flat = inline_calls(trace.step.jaxpr, is_ours)
        inputs = [*trace.step.inputs, *(StepInput(constant=x) for x in flat.constants)]
        held = [i for i, each in enumerate(inputs) if each.variable is not None]
        values = with_values(flat.jaxpr, held)
        # Flat. Variables that are no values are references.
        self._jaxpr = values.jaxpr
        invars, outvars = self._jaxpr.invars, self._jaxpr.outvars
        self._inputs: dict[Var, StepInput] = dict(zip(invars, inputs, strict=True))
        self._results = outvars[: len(trace.step.varies)]
        # What the inputs end as that are variables and values.
        replaced = (invars[i] for i in values.replaced)
        last = outvars[len(flat.jaxpr.outvars) :]
        self._ends: dict[Var, Atom] = dict(zip(replaced, last, strict=True))
        # All that the function does to variables, in its order.
        self._operations: list[Operation] = []
        current: dict[Var, Var] = {var: var for var in self._ends}
        # The input whose value at some point a variable of the trace is.
        self._versions = dict(current)
        for eqn in self._jaxpr.eqns:
            self._check_stand_ins(eqn)
            each = _operation(eqn, current)
            if each is None:
                continue
            self._operations.append(each)
            if each.name != READ:
                for var in [v for v, i in current.items() if i in each.variables]:
                    del current[var]
                made = dict(zip(eqn.outvars, each.variables, strict=True))
                current |= made
                self._versions |= made
        # The inputs whose changes these are; others change in branches or loops.
        self._whole = {
            var
            for var, end in self._ends.items()
            for atom in variables([end])
            if current.get(atom) is var
        }
        # Those of which rows are enough.
        self._tables = self._find_tables()
        # Of each of those: the number of the table, that of the lookup, and itself.
        count = itertools.count()
        self._uses: dict[int, tuple[int, int, Operation]] = {
            id(use.eqn): (number, next(count), use)
            for number, uses in enumerate(self._tables.values())
            for use in uses
        }
        # Of the main program: the results, and operands of what is pushed.
        self._outputs: list[Atom] = list(self._results)

    def _check_stand_ins(self, eqn: Equation) -> None:
        inner = map(name_in_trace, inner_eqns(eqn.params))
        is_one = name_in_trace(eqn).startswith(PREFIX)
        if not is_one and any(name.startswith(PREFIX) for name in inner):
            line = Site((eqn,)).line or "unknown"
            raise ValueError(
                f"`{self._name}` takes an element of an iterator in a branch or a "
                "loop, which is traced once: each turn would see the same element.\n"
                f"  the {eqn.primitive.name}: {line}\n"
                "Take the elements before it, and stack them: `jax.lax.scan` goes "
                "through the first dimension."
            )

    def shipped(
        self,
        platforms: Sequence[str],
        iterators: tuple[tuple[ElementType, ...], ...],
        as_code: AsCode | None,
    ) -> ShippedProgram:
        varies, count = self._trace.step.varies, itertools.count()
        at_end = [
            each
            for each in self._operations
            if each.name != READ and self._whole.issuperset(each.variables)
        ]
        pushes = [*map(self._push, at_end), *self._sums()]
        own = tuple(self._own())
        tables = [
            self._table(number, shards, tuple(next(count) for _ in uses))
            for number, (shards, uses) in enumerate(self._tables.items())
        ]
        layouts = [STACKED if differs else REPLICATED for differs in varies]
        layouts += [REPLICATED] * (len(self._outputs) - len(layouts))
        main, inputs, types = self._program(self._outputs, layouts, keeps_effects=True)
        main_inputs = len(inputs)
        ids, ids_inputs, ids_types = None, list[Input](), list[Type]()
        if lookups := [use.operands[0] for _, _, use in self._uses.values()]:
            stacked = [STACKED] * len(lookups)
            ids, ids_inputs, ids_types = self._program(lookups, stacked)
            inputs += [each for each in ids_inputs if each not in inputs]
        numbers = {each.number for each in inputs if each.kind == "variable"}
        numbers.update(i for table in tables for i in table.shards)
        numbers.update(i for push in pushes for i in push.variables)
        of_ids = (
            None if ids is None or as_code else _exported(ids, ids_types, platforms)
        )
        made = ShippedProgram(
            key="",
            name=self._name,
            main=as_code(main, ids) if as_code else _exported(main, types, platforms),
            inputs=tuple(inputs),
            main_inputs=main_inputs,
            ids=of_ids,
            ids_inputs=tuple(inputs.index(each) for each in ids_inputs),
            tables=tuple(tables),
            results=len(varies),
            own=own,
            pushes=tuple(pushes),
            iterators=iterators,
            homes={number: self._pool.home(number) for number in sorted(numbers)},
            replicas=self._replicas.count,
        )
        # One that has no exported form equals no other one.
        content = secrets.token_bytes(32) if as_code else pickle.dumps(made)
        return dataclasses.replace(made, key=hashlib.sha256(content).hexdigest())

    # Which rows of tables are enough.

    def _find_tables(self) -> _Tables:
        tables: _Tables = {}
        for each in self._operations:
            if each.is_of_rows:
                tables.setdefault(each.variables, []).append(each)
        for shards, why in list(self._also_whole(tables)):
            del tables[shards]
            if why is not None:
                self._warn_of_whole_table(shards, why)
        while (late := self._with_late_ids(tables)) is not None:
            del tables[late]
            why = "asks for rows whose numbers depend on rows that it has read"
            self._warn_of_whole_table(late, why)
        return tables

    def _also_whole(
        self, tables: _Tables
    ) -> Iterator[tuple[tuple[Var, ...], str | None]]:
        """Tables that something else uses, too, than reads and changes of rows."""
        known = {id(each.eqn): each for each in self._operations}
        read = self._held(self._results)
        changed: set[Var] = set()  # by what says nothing of rows
        for eqn in self._jaxpr.eqns:
            operation = known.get(id(eqn))
            read |= self._held(eqn.invars if operation is None else operation.operands)
            if operation is None:
                continue
            if not operation.is_of_rows:
                changed.update(operation.variables)
            elif operation.name == READ:
                read |= changed.intersection(operation.variables)
        for shards in tables:
            others = {var for other in tables if other != shards for var in other}
            if not self._whole.issuperset(shards):
                yield shards, "changes rows in a branch or a loop"
            elif read.intersection(shards) or others.intersection(shards):
                yield shards, None

    def _held(self, atoms: Iterable[Atom]) -> set[Var]:
        """The inputs whose values at some point these atoms are."""
        return {self._versions[a] for a in variables(atoms) if a in self._versions}

    def _with_late_ids(self, tables: _Tables) -> tuple[Var, ...] | None:
        """A table whose rows are known only when others have been read."""
        by_eqn = {id(use.eqn): use for uses in tables.values() for use in uses}
        late: set[Var] = set()
        for eqn in self._jaxpr.eqns:
            use = by_eqn.get(id(eqn))
            operands = eqn.invars if use is None else use.operands[:1]
            is_late = not late.isdisjoint(variables(operands))
            if use is not None and is_late:
                return use.variables
            if is_late or (use is not None and use.name == READ):
                late.update(eqn.outvars)
        return None

    def _warn_of_whole_table(self, shards: tuple[Var, ...], why: str) -> None:
        name = self._variable(shards[0]).name
        text.warn(
            f"`{self._name}` {why}, of variable {name!r}. So all of it is sent "
            "to the worker for each call. Where that is much, look the rows up at the "
            "top level of the function, by numbers that it is given or computes.",
            WholeTableWarning,
        )

    # What servers do.

    def _push(self, operation: Operation) -> Push:
        use = self._uses.get(id(operation.eqn))
        lookup = None if use is None else use[1]
        operands = operation.operands if use is None else operation.operands[1:]
        numbers = tuple(map(self._number, operation.variables))
        program = ""
        if operation.name == "update":
            called: Any = operation.eqn.params["jaxpr"]
            own, count = core.jaxpr_as_fun(called), len(numbers)
            avals = [atom.aval for atom in operation.eqn.invars]
            types = [Type(x.shape, x.dtype) for x in (*avals[-count:], *avals[:-count])]
            update = exported_update(lambda *x: own(*x[count:], *x[:count]), types)
            program = update.key
            # The servers must have it before any worker asks for it.
            self._pool.define(self._pool.home(numbers[0]), program, update.exported)
        starts = self._starts(operation.variables) if operation.is_of_rows else ()
        outputs = tuple(map(self._output, operands))
        return Push(operation.name, numbers, outputs, lookup, starts, program=program)

    def _sums(self) -> Iterator[Push]:
        """What branches and loops added in all, or what they assigned in the end."""
        of: dict[Any, Var] = {x.variable: var for var, x in self._inputs.items()}
        for var, each in self._inputs.items():
            kind = server_kind_of(each.variable)
            if kind is None or var in self._whole:
                continue
            methods = self._trace.recorder.changes.get(kind.added)
            if not methods:
                continue
            self._check_counted(kind, var, methods)
            number, flag = (self._number(var),), None
            if "assign" in methods:
                flag = self._final(of[kind.is_assigned])
                yield Push("set", number, (self._final(var),), flag=flag)
            if methods != {"assign"}:
                added = self._final(of[kind.added])
                yield Push("add", number, (added,), flag=flag, flag_is=False)

    def _check_counted(self, kind: ServerKind, var: Var, methods: set[str]) -> None:
        together = any(
            var in each.variables and len(each.variables) > 1
            for each in self._operations
            if each.name == "update"
        )
        beyond = sorted(methods - _COUNTED)
        if beyond or together:
            name = beyond[0] if beyond else "update"
            raise ValueError(
                f"`{self._name}` changes variable {kind.name!r} in a branch or a "
                f"loop, by `{name}` among others. There a function may call "
                f"{', '.join(f'`{each}`' for each in sorted(_COUNTED))} of a variable "
                "that is on a parameter server. Compute in the loop, and call "
                f"`{name}` once after it."
            )

    def _own(self) -> Iterator[tuple[int, int]]:
        for var, each in self._inputs.items():
            if (kind := per_worker_kind_of(each.variable)) is None:
                continue
            if var in self._ends:
                is_changed = self._ends[var] is not var
            else:
                is_changed = any(var in eqn.invars for eqn in self._jaxpr.eqns)
            if is_changed:
                yield kind.resource.number, self._final(var)

    def _output(self, output: Atom) -> int:
        self._outputs.append(output)
        return len(self._outputs) - 1

    def _final(self, var: Var) -> int:
        """The output that says what an input ends as."""
        return self._output(self._ends.get(var, var))

    def _starts(self, shards: Sequence[Var]) -> tuple[int, ...]:
        rows = (_type_of(shard).shape[0] for shard in shards)
        return tuple(itertools.accumulate(rows, initial=0))

    def _variable(self, var: Var) -> Any:
        return self._inputs[var].variable

    def _number(self, var: Var) -> int:
        """The number of a variable on the servers."""
        return self._variable(var).cell.number

    def _table(
        self, number: int, shards: tuple[Var, ...], lookups: tuple[int, ...]
    ) -> ShippedTable:
        aval = _type_of(shards[0])
        return ShippedTable(
            shards=tuple(map(self._number, shards)),
            starts=self._starts(shards),
            lookups=lookups,
            rows=self._rows(number),
            row=tuple(aval.shape[1:]),
            dtype=str(aval.dtype),
        )

    # What workers compute.

    def _rows(self, table: int) -> int:
        """How many rows of a table all its lookups together name, of all replicas."""
        uses = list(self._tables.values())[table]
        return (
            sum(_type_of(use.operands[0]).size for use in uses) * self._replicas.count
        )

    def _program(
        self,
        outputs: Sequence[Atom],
        returned: Sequence[ReplicaLayout],
        keeps_effects: bool = False,
    ) -> tuple[Wrapped, list[Input], list[Type]]:
        """The function of all replicas that computes some values of the trace."""
        eqns, needed = self._needed(outputs, keeps_effects)
        known = [var for var in needed if self._source(var) is None]
        taken = [*self._taken(needed), *self._stand_ins(eqns)]

        def replica(*given: Leaf) -> list[jax.Array]:
            # What is known when it begins: constants, and nothing added yet.
            values: dict[Var, Any] = {}
            for var in known:
                each, pending = self._inputs[var], self._inputs[var].variable
                value = each.constant if pending is None else pending.value()
                values[var] = _held(var, value)
            inputs = {
                each: value for (each, *_), value in zip(taken, given, strict=True)
            }
            for (each, var, layout, _), value in zip(taken, given, strict=True):
                if var is not None:
                    values[var] = _held(var, self._with_keys(each, value))
                elif layout is STACKED:
                    inputs[each] = jax.lax.squeeze(value, (0,))
            for eqn in eqns:
                values.update(
                    zip(eqn.outvars, self._computed(eqn, values, inputs), strict=True)
                )
            made = [
                _read(values, each)[...] if _is_reference(each) else _read(values, each)
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
        return jitted, [each for each, *_ in taken], [of_type for *_, of_type in taken]

    def _needed(
        self, outputs: Sequence[Atom], keeps_effects: bool
    ) -> tuple[list[Equation], list[Var]]:
        """The equations that lead to some results, and the inputs that these need."""
        wanted = set(variables(outputs))
        kept: list[Equation] = []
        for eqn in reversed(self._jaxpr.eqns):
            has_effects = keeps_effects and _has_effects(eqn)
            if has_effects or not wanted.isdisjoint(eqn.outvars):
                kept.append(eqn)
                if not name_in_trace(eqn).startswith(PREFIX):
                    # The rows of a table come from elsewhere. The shards stay: a change
                    # of them must be made before what is read then.
                    first = 1 if id(eqn) in self._uses else 0
                    wanted.update(variables(eqn.invars[first:]))
        return kept[::-1], [var for var in self._jaxpr.invars if var in wanted]

    def _source(self, var: Var) -> Input | None:
        """Where a worker has an input from; None of one that is known here."""
        each = self._inputs[var]
        if each.argument is not None:
            return Input("argument", each.argument)
        if (kind := per_worker_kind_of(each.variable)) is not None:
            return Input("own", kind.resource.number)
        if server_kind_of(each.variable) is not None:
            return Input("variable", self._number(var))
        return None

    def _taken(self, needed: Sequence[Var]) -> Iterator[_Taken]:
        """The inputs that are variables of the trace."""
        shards = {var for each in self._tables for var in each}
        for var in needed:
            given, aval = self._source(var), _type_of(var)
            if given is None or var in shards:
                continue
            is_argument, shape = given.kind == "argument", aval.shape
            layout = self._inputs[var].layout if is_argument else REPLICATED
            if layout is STACKED:
                shape = (self._replicas.count, *shape[1:])
            of_type = jax.eval_shape(as_numbers, Type(shape, aval.dtype))
            yield given, var, layout, of_type

    def _stand_ins(self, eqns: Sequence[Equation]) -> Iterator[_Taken]:
        """The inputs for which something else stands in the trace."""
        recorder, count = self._trace.recorder, self._replicas.count
        used = {self._uses[id(eqn)][0] for eqn in eqns if id(eqn) in self._uses}
        for number in sorted(used):
            var = list(self._tables)[number][0]
            aval = _type_of(var)
            of_type = Type((self._rows(number), *aval.shape[1:]), aval.dtype)
            yield Input("table", number), var, REPLICATED, of_type
        for eqn in eqns:
            if (use := self._uses.get(id(eqn))) is not None:
                _, lookup, operation = use
                of_type = Type((count, *_type_of(operation.operands[0]).shape), "int32")
                yield Input("positions", lookup), None, STACKED, of_type
            elif (number := _stand_in(eqn)) is not None:
                aval = _type_of(eqn.outvars[0])
                layout = STACKED if recorder.split[number] else REPLICATED
                shape = (count,) * (layout is STACKED) + aval.shape
                of_type = Type(shape, aval.dtype)
                yield recorder.inputs[number], None, layout, of_type

    def _with_keys(self, given: Input, value: jax.Array) -> jax.Array:
        """An argument as the trace knows it, which a worker has as numbers."""
        is_argument = given.kind == "argument"
        how = self._trace.keys.get(given.number) if is_argument else None
        return value if how is None else jax.random.wrap_key_data(value, impl=how)

    def _computed(
        self, eqn: Equation, values: dict[Var, Any], inputs: dict[Input, jax.Array]
    ) -> Sequence[Any]:
        use, number = self._uses.get(id(eqn)), _stand_in(eqn)
        if number is not None:
            return [inputs[self._trace.recorder.inputs[number]]]
        if use is None:
            return function_of(eqn)(*(_read(values, atom) for atom in eqn.invars))
        _, lookup, operation = use
        positions = inputs[Input("positions", lookup)]
        if operation.name == READ:
            return [values[eqn.invars[1]][positions]]
        change = SCATTERS[operation.name.removeprefix("scatter_")].operation
        given, table = _read(values, eqn.invars[1]), values[eqn.invars[2]]
        # The first shard stands for all rows.
        return [changed(table, positions, given, change)] * len(eqn.outvars)


def _operation(eqn: Equation, current: dict[Var, Var]) -> Operation | None:
    """What an equation does to what variables hold then; None to something else."""
    marked = name_in_trace(eqn)
    if not marked.startswith(SERVER_PREFIX):
        return None
    name, _, count = marked.removeprefix(SERVER_PREFIX).partition("_of_")
    if name == READ:
        first, last = 1, len(eqn.invars)
    elif name.startswith("scatter_"):
        first, last = 2, len(eqn.invars)
    elif name == "update":  # before them is what its function captures, too
        first, last = len(eqn.invars) - int(count or 1), len(eqn.invars)
        if any(map(_is_reference, eqn.invars[:first])):
            return None
    else:
        first, last = 0, 1
    inputs = [current.get(var) for var in variables(eqn.invars[first:last])]
    found = tuple(var for var in inputs if var is not None)
    if len(set(found)) < last - first:
        return None
    return Operation(name, found, (*eqn.invars[:first], *eqn.invars[last:]), eqn)


def _has_effects(eqn: Equation) -> bool:
    """Whether it does something besides; the names of axes count as effects to JAX."""
    effects: Any = eqn.effects
    changes = any(map(_is_reference, eqn.invars))
    return changes or any(not hasattr(effect, "name") for effect in effects)


def _stand_in(eqn: Equation) -> int | None:
    """The number of the input that an equation stands for."""
    name = name_in_trace(eqn)
    return int(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None


def _type_of(atom: Atom) -> ArrayType:
    """The type of a value, or of what a reference refers to."""
    return getattr(atom.aval, "inner_aval", atom.aval)


def _read(values: dict[Var, Any], atom: Atom) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def _held(var: Var, value: Leaf) -> Leaf:
    return jax.new_ref(value) if _is_reference(var) else value


def _is_reference(atom: Atom) -> bool:
    return isinstance(atom.aval, AbstractRef)
