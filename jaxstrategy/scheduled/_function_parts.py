"""The program of a function that a worker runs, piece by piece: `FunctionParts`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
from jax.extend import core
from jax.extend.core import DropVar, Literal
from jax.ref import AbstractRef

from jaxstrategy.parameter_servers._shipped_program import Input
from jaxstrategy.replicas._random_keys import as_numbers
from jaxstrategy.replicas._replicas import SAME, SPLIT, Meaning, Replicas
from jaxstrategy.scheduled._function_trace import (
    FunctionTrace,
    name_in_trace,
)
from jaxstrategy.scheduled._needed import needed
from jaxstrategy.scheduled._recorder import PREFIX
from jaxstrategy.scheduled._traced_operations import (
    READ,
    TracedOperation,
)
from jaxstrategy.scheduled._traced_tables import TracedTable
from jaxstrategy.tracing._jaxpr_types import ArrayType, Atom, Equation, Var
from jaxstrategy.tracing._on_replicas import on_replicas
from jaxstrategy.tracing.replication._jaxprs import closed, jaxpr_of
from jaxstrategy.values._handle import Handle
from jaxstrategy.values._types import Function, Leaf
from jaxstrategy.variables._changes import SCATTERS, changed
from jaxstrategy.variables.kinds._per_worker_kind import per_worker_kind_of
from jaxstrategy.variables.kinds._server_kind import server_kind_of

_Values: TypeAlias = dict[Var, Any]
Final: TypeAlias = int
"""A result of a program that is what a variable's input ends as."""


@final
class FunctionParts:
    """Programs that compute some results of a trace, from what a worker has.

    Args:
      trace: the function.
      tables: of which only rows are there.
      replicas: of a worker.
    """

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
        """The function of all replicas that computes some values of the trace.

        Args:
          results: of the trace.
          returned: how each of them lies; those that are split are `[replica, ...]`.
          finals: inputs that are references, whose contents at the end come next.
          keeps_effects: whether it also does what the trace does besides.

        Returns:
          It, a function that returns a list; where it takes its arguments from; how
          they lie; and their types.
        """
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
    """Equations that follow each other, as one function.

    Args:
      eqns: them.
      wanted: what later equations and results need of what they make.
    """

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
