"""The part of a divided step that each replica computes: `Inside`.

An array of which the replica has a part is gathered where it is needed whole: in the
body of a loop over its layers if it is given to such loops only, so that no replica
ever has all of it. A sum of which the replicas need their parts only is scattered, in
the body of the loop that makes it if there is one. S. Rajbhandari et al. ZeRO: Memory
optimizations toward training trillion parameter models. arXiv:1910.02054 (2019).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import DropVar, Literal
from jax.typing import DTypeLike

from jaxstrategy.reductions._shard_functions import ShardFunction
from jaxstrategy.reductions._table_rows import part_of_sum
from jaxstrategy.replicas._inner_placement import WHOLE, InnerSpec
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.tracing._jaxpr_types import ArrayType, Atom, Equation, Var
from jaxstrategy.tracing.division._borders import Borders, is_sum_of_all
from jaxstrategy.tracing.division._functions_of_parts import (
    call_of_parts,
    evaluation_of_parts,
)
from jaxstrategy.tracing.division._loops import divided_loop, layers_in_parts
from jaxstrategy.tracing.division._rematerialised import (
    computed_again,
    parts_computed_again,
)
from jaxstrategy.tracing.division._replica_values import (
    Evaluation,
    ReplicaValues,
)
from jaxstrategy.tracing.replication._jaxprs import closed, jaxpr_of


@final
@dataclasses.dataclass(frozen=True)
class Exchange:
    """One gather or scatter that dividing the state has made.

    Attributes:
      kind: `"all_gather"` or `"reduce_scatter"`.
      var: what is gathered, or summed.
      type: shape and dtype of all of it.
      loop: the equation of the loop in whose turns it is done, None outside of loops.
      before: the equation that is the first to read what is gathered; the one that
        makes what is scattered, or sums it.
    """

    kind: str
    var: Var
    type: ArrayType
    loop: Equation | None
    before: Equation


@final
class Inside:
    """The equations of each replica, with arrays of which it has parts.

    Args:
      eqns: in order.
      parts: the dimension of each input of which a replica has a part.
      inner: how the devices of a replica divide these.
      borders: the sums that are divided.
      wanted: the variables that are needed afterwards.
      replicas: those of the step.
      varies: whether a value may differ between replicas.

    Attributes:
      exchanges: the gathers and scatters that this makes, in order.
      functions: those that are computed from parts, by the `id` of the equation.
      inner: how the devices of a replica divide what a replica has a part of.
    """

    def __init__(
        self,
        eqns: Sequence[Equation],
        parts: Mapping[Var, int],
        inner: Mapping[Var, InnerSpec],
        borders: Borders,
        wanted: Iterable[Var],
        replicas: Replicas,
        varies: Callable[[Atom], bool],
    ) -> None:
        self._borders = borders
        self._varies = varies
        self._replicas = replicas
        self._dimensions = dict(parts)
        self.inner = {**inner, **borders.inner}
        self._last = _last_uses(eqns, wanted, borders)
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
        return {**self._dimensions, **self._borders.sums}

    def _add(self, number: int, eqn: Equation) -> None:
        if id(eqn) in self._borders.passed_over:
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
            divided = [var for var in eqn.outvars if var in self._borders.sums]
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
        in_loops = self._borders.in_loops
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
        borders = self._borders
        done = borders.in_loops  # where the loop is
        pairs = zip(eqn.invars, eqn.outvars, strict=True)
        own = [(operand, result) for operand, result in pairs if result not in done]
        for operand, result in own:
            if result in borders.of_functions:
                for call in borders.of_functions[result]:
                    self._need_whole(eqn, call.invars)
                continue
            if result in borders.sums:
                self._tell("reduce_scatter", result, eqn)
            self._need_whole(eqn, [operand])

        def evaluate(values: ReplicaValues) -> None:
            for operand, result in own:
                _evaluate_sum(operand, result, values, borders)

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
    operand: Atom, result: Var, values: ReplicaValues, borders: Borders
) -> None:
    """One sum over the replicas, or this replica's part of it."""
    if (calls := borders.of_functions.get(result)) is not None:
        dtype = result.aval.dtype
        parts = [_part_of_sum(call, dtype, values) for call in calls]
        total = functools.reduce(operator.add, parts)
        values.parts[result] = values.collectives.of_one_device(total)
    elif (dimension := borders.sums.get(result)) is not None:
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
    eqns: Sequence[Equation], wanted: Iterable[Var], borders: Borders
) -> dict[Var, int]:
    """The number of the last equation that reads each variable."""
    last: dict[Var, int] = {}
    for number, eqn in enumerate(eqns):
        of = borders.of_functions
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
