"""A trace as workers get it: `shipped`."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import jax
from jax.extend import core
from jax.stages import Wrapped

from jaxstrategy._errors import MissingExtraError, WholeTableWarning
from jaxstrategy.parameter_servers._server_pool import ServerPool
from jaxstrategy.parameter_servers._shipped_program import (
    AbstractHostCode,
    ElementType,
    Input,
    Push,
    ShippedProgram,
    ShippedTable,
)
from jaxstrategy.replicas._replicas import SAME, SPLIT, Meaning, Replicas
from jaxstrategy.scheduled._function_parts import FunctionParts
from jaxstrategy.scheduled._function_trace import FunctionTrace
from jaxstrategy.scheduled._traced_operations import (
    TracedOperation,
    TracedOperations,
    operations_of,
)
from jaxstrategy.scheduled._traced_tables import (
    TracedTables,
    stand_ins_inside,
    tables_of,
)
from jaxstrategy.text import _user_code
from jaxstrategy.tracing._jaxpr_types import ArrayType, Atom
from jaxstrategy.tracing.replication._site import Site
from jaxstrategy.values._types import Function
from jaxstrategy.variables._variable import Variable
from jaxstrategy.variables.kinds._exported_update import ExportedUpdate, exported_update
from jaxstrategy.variables.kinds._per_worker_kind import per_worker_kind_of
from jaxstrategy.variables.kinds._server_kind import ServerKind, server_kind_of

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
    """The program of a function, in the form in which it is sent.

    Args:
      trace: the function.
      replicas: of a worker.
      pool: the servers.
      platforms: of the workers' devices.
      iterators: of each iterator that it is given the types of what it takes.

    Raises:
      ValueError: it takes elements of an iterator, or changes variables, in a branch or
        a loop, in a way that no server can do.
      MissingExtraError: the extra is not installed.
    """
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
            _user_code.warn(
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
