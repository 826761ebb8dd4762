"""The part of a step that each replica computes: `PerReplicaPart`."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import DropVar, Literal
from jax.typing import DTypeLike

from jaxstrategy._src.reductions.rows import ShardFunction, part_of_sum
from jaxstrategy._src.replicas.inner_axes import WHOLE, InnerSpec
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing.jaxprs.visit import (
    ArrayType,
    Atom,
    Equation,
    Var,
    closed,
    jaxpr_of,
)
from jaxstrategy._src.tracing.partition.reduce_scatters import (
    LoopSum,
    ReduceScatters,
    is_sum_of_all,
)
from jaxstrategy._src.tracing.partition.values import (
    Evaluation,
    ReplicaValues,
    call_of_parts,
    computed_again,
    evaluation_of_parts,
    parts_computed_again,
)
from jaxstrategy._src.tracing.replication.control import scan_counts
from jaxstrategy._src.values.arrays import Leaf


def layers_in_parts(eqn: Equation, parts: Mapping[Var, int]) -> dict[int, int]:
    """The operands of a loop that it can gather turn by turn, and their dimensions."""
    first = sum(scan_counts(eqn))
    return {
        place: parts[atom]
        for place, atom in enumerate(eqn.invars)
        # Along the first dimension are the turns: each would need another's part.
        if place >= first and not isinstance(atom, Literal) and parts.get(atom, 0) > 0
    }


def divided_loop(
    eqn: Equation, layers: Mapping[int, int], sums: Mapping[Var, LoopSum]
) -> Evaluation:
    """A loop that gathers in each turn what it reads, and sums what it makes."""
    n_consts, n_carry = scan_counts(eqn)
    first = n_consts + n_carry
    function = core.jaxpr_as_fun(eqn.params["jaxpr"])
    summed = {
        list(eqn.outvars).index(each.stacked): sum_ for sum_, each in sums.items()
    }

    def evaluate(values: ReplicaValues) -> None:
        operands = [
            values.parts[atom] if place in layers else values.whole(atom)
            for place, atom in enumerate(eqn.invars)
        ]

        collectives = values.collectives

        def body(carry: list[Leaf], layer: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
            whole = [
                collectives.gathered(x, layers[place] - 1, eqn.invars[place], True)
                if place in layers
                else x
                for place, x in enumerate(layer, start=first)
            ]
            results = function(*operands[:n_consts], *carry, *whole)
            stacked = [
                _part_of_layer_sum(x, summed[place], sums, values)
                if place in summed
                else x
                for place, x in enumerate(results[n_carry:], start=n_carry)
            ]
            return results[:n_carry], stacked

        carry, stacked = lax.scan(
            body, operands[n_consts:first], operands[first:], **_options(eqn)
        )
        for place, (var, value) in enumerate(
            zip(eqn.outvars, [*carry, *stacked], strict=True)
        ):
            if place not in summed:
                values.keep([var], [value])
        for result, each in sums.items():
            values.parts[result] = stacked[
                list(eqn.outvars).index(each.stacked) - n_carry
            ]

    return evaluate


def _part_of_layer_sum(
    array: jax.Array, result: Var, sums: Mapping[Var, LoopSum], values: ReplicaValues
) -> jax.Array:
    for dtype in sums[result].dtypes:
        array = lax.convert_element_type(array, dtype)
    dimension = sums[result].dimension - 1
    return values.collectives.scattered(array, dimension, result, True)


def _options(eqn: Equation) -> dict[str, Any]:
    names = ("length", "reverse", "unroll", "_split_transpose")
    return {name: eqn.params[name] for name in names if name in eqn.params}


@final
@dataclasses.dataclass(frozen=True)
class Exchange:
    """One gather or scatter that dividing the state has made."""

    kind: str
    var: Var
    type: ArrayType
    loop: Equation | None
    before: Equation


@final
class PerReplicaPart:
    """The equations of each replica, with arrays of which it has parts."""

    def __init__(
        self,
        eqns: Sequence[Equation],
        parts: Mapping[Var, int],
        inner: Mapping[Var, InnerSpec],
        reduce_scatters: ReduceScatters,
        wanted: Iterable[Var],
        replicas: Replicas,
        varies: Callable[[Atom], bool],
    ) -> None:
        self._reduce_scatters = reduce_scatters
        self._varies = varies
        self._replicas = replicas
        self._dimensions = dict(parts)
        self.inner = {**inner, **reduce_scatters.inner}
        self._last = _last_uses(eqns, wanted, reduce_scatters)
        self.exchanges: list[Exchange] = []
        self.functions: dict[int, ShardFunction] = {}
        self._gathered: set[Var] = set()
        self._evaluations: list[Evaluation] = []
        self._pending: list[Equation] = []
        for number, eqn in enumerate(eqns):
            self._add(number, eqn)
        self._close(len(eqns))

    def evaluate(self, values: ReplicaValues) -> None:
        """Evaluates all equations."""
        for evaluation in self._evaluations:
            evaluation(values)

    @property
    def dimensions(self) -> Mapping[Var, int]:
        """The dimension of everything of which a replica has a part."""
        return {**self._dimensions, **self._reduce_scatters.sums}

    def _add(self, number: int, eqn: Equation) -> None:
        if id(eqn) in self._reduce_scatters.passed_over:
            return
        special = self._special(eqn)
        if special is None:
            self._pending.append(eqn)
            self._need_whole(eqn, eqn.invars)
        else:
            self._close(number)
            self._evaluations.append(special)

    def _special(self, eqn: Equation) -> Evaluation | None:
        """The evaluation of an equation that works on parts; None of others."""
        name = eqn.primitive.name
        if name == "convert_element_type" and eqn.invars[0] in self._parts_of(eqn):
            return self._conversion(eqn)
        if name == "scan":
            return self._loop(eqn)
        if (function := call_of_parts(eqn, self._dimensions, self._varies)) is not None:
            return self._call(eqn, function)
        if divided := parts_computed_again(eqn, self._dimensions):
            return self._second_computation(eqn, divided)
        if is_sum_of_all(eqn, self._replicas):
            divided = [var for var in eqn.outvars if var in self._reduce_scatters.sums]
            return self._sum(eqn) if divided else None
        return None

    def _parts_of(self, eqn: Equation) -> list[Var]:
        return [
            atom
            for atom in eqn.invars
            if not isinstance(atom, Literal) and atom in self._dimensions
        ]

    def _conversion(self, eqn: Equation) -> Evaluation:
        """Of the part: what is gathered afterwards has fewer bytes, as a rule."""
        (operand,), (result,) = eqn.invars, eqn.outvars
        self._dimensions[result] = self._dimensions[operand]
        self.inner[result] = self.inner.get(operand, WHOLE)
        dtype = eqn.params["new_dtype"]

        def evaluate(values: ReplicaValues) -> None:
            values.parts[result] = lax.convert_element_type(
                values.parts[operand], dtype
            )

        return evaluate

    def _call(self, eqn: Equation, function: ShardFunction) -> Evaluation:
        self.functions[id(eqn)] = function
        self._dimensions.update((eqn.outvars[i], 0) for i in function.returns_divided)
        divided = function.divided
        self._need_whole(eqn, (a for i, a in enumerate(eqn.invars) if i not in divided))
        return evaluation_of_parts(eqn, function)

    def _second_computation(
        self, eqn: Equation, divided: Mapping[int, int]
    ) -> Evaluation:
        for place in divided:
            self._tell("all_gather", eqn.invars[place], eqn)
        self._need_whole(eqn, (a for i, a in enumerate(eqn.invars) if i not in divided))
        return computed_again(eqn, divided)

    def _loop(self, eqn: Equation) -> Evaluation | None:
        layers = layers_in_parts(eqn, self._dimensions)
        in_loops = self._reduce_scatters.in_loops
        sums = {var: each for var, each in in_loops.items() if each.loop is eqn}
        if not layers and not sums:
            return None
        for place in layers:
            self._tell("all_gather", eqn.invars[place], eqn, loop=eqn)
        for result in sums:
            self._tell("reduce_scatter", result, eqn, loop=eqn)
        self._need_whole(eqn, (a for i, a in enumerate(eqn.invars) if i not in layers))
        return divided_loop(eqn, layers, sums)

    def _sum(self, eqn: Equation) -> Evaluation:
        reduce_scatters = self._reduce_scatters
        done = reduce_scatters.in_loops  # where the loop is
        pairs = zip(eqn.invars, eqn.outvars, strict=True)
        own = [(operand, result) for operand, result in pairs if result not in done]
        for operand, result in own:
            if result in reduce_scatters.of_functions:
                for call in reduce_scatters.of_functions[result]:
                    self._need_whole(eqn, call.invars)
                continue
            if result in reduce_scatters.sums:
                self._tell("reduce_scatter", result, eqn)
            self._need_whole(eqn, [operand])

        def evaluate(values: ReplicaValues) -> None:
            for operand, result in own:
                _evaluate_sum(operand, result, values, reduce_scatters)

        return evaluate

    def _need_whole(self, eqn: Equation, atoms: Iterable[Atom]) -> None:
        for atom in atoms:
            if isinstance(atom, Literal) or atom not in self._dimensions:
                continue
            if atom not in self._gathered:
                self._gathered.add(atom)
                self._tell("all_gather", atom, eqn)

    def _tell(
        self, kind: str, var: Atom, before: Equation, loop: Equation | None = None
    ) -> None:
        self.exchanges.append(Exchange(kind, var, var.aval, loop, before))

    def _close(self, number: int) -> None:
        """End the run of equations that are evaluated as they are."""
        if self._pending:
            made = [
                var
                for eqn in self._pending
                for var in eqn.outvars
                if not isinstance(var, DropVar) and self._last.get(var, -1) >= number
            ]
            self._evaluations.append(_as_they_are(self._pending, made))
            self._pending = []


def _evaluate_sum(
    operand: Atom, result: Var, values: ReplicaValues, reduce_scatters: ReduceScatters
) -> None:
    """One sum over the replicas, or this replica's part of it."""
    if (calls := reduce_scatters.of_functions.get(result)) is not None:
        dtype = result.aval.dtype
        parts = [_part_of_sum(call, dtype, values) for call in calls]
        total = functools.reduce(operator.add, parts)
        values.parts[result] = values.collectives.of_one_device(total)
    elif (dimension := reduce_scatters.sums.get(result)) is not None:
        array = values.whole(operand)
        values.parts[result] = values.collectives.scattered(array, dimension, result)
    else:
        values.keep([result], [values.collectives.total(values.whole(operand))])


def _part_of_sum(call: Equation, dtype: DTypeLike, values: ReplicaValues) -> jax.Array:
    """This replica's part of the sum of the tables to which each adds rows."""
    table, *rows = call.invars
    operands = map(values.whole, rows)
    axes = values.collectives.axes
    return part_of_sum(table.aval.shape, *operands, axes=axes, dtype=dtype)


def _last_uses(
    eqns: Sequence[Equation], wanted: Iterable[Var], reduce_scatters: ReduceScatters
) -> dict[Var, int]:
    """The number of the last equation that reads each variable."""
    last: dict[Var, int] = {}
    for number, eqn in enumerate(eqns):
        of = reduce_scatters.of_functions
        calls = [call for var in eqn.outvars for call in of.get(var, ())]
        for atom in (*eqn.invars, *(a for call in calls for a in call.invars)):
            if not isinstance(atom, Literal):
                last[atom] = number
    last.update((var, len(eqns)) for var in wanted)
    return last


def _as_they_are(eqns: Sequence[Equation], wanted: Sequence[Var]) -> Evaluation:
    """The evaluation of equations one after the other, for some of their results."""
    made = {var for eqn in eqns for var in eqn.outvars}
    atoms = [atom for eqn in eqns for atom in eqn.invars]
    needed = [a for a in atoms if not isinstance(a, Literal) and a not in made]
    free = list(dict.fromkeys(needed))
    function = core.jaxpr_as_fun(closed(jaxpr_of(free, list(eqns), wanted)))

    def evaluate(values: ReplicaValues) -> None:
        values.keep(wanted, function(*map(values.whole, free)))

    return evaluate
