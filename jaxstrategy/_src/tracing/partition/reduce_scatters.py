"""Finds the all-reduces that can become reduce-scatters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import final

from jax.extend.core import Literal
from jax.typing import DTypeLike

from jaxstrategy._src.replicas.inner_axes import WHOLE, InnerSpec
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing.jaxprs.visit import (
    Atom,
    Effect,
    Equation,
    Jaxpr,
    Var,
    closed_jaxprs,
    effect_of,
    origins_of,
    uses_of,
)
from jaxstrategy._src.tracing.partition.layout import Layout
from jaxstrategy._src.tracing.partition.partition import Partition
from jaxstrategy._src.tracing.partition.values import adds_few_rows
from jaxstrategy._src.tracing.replication.control import scan_counts


@final
@dataclasses.dataclass(frozen=True)
class Along:
    """A division over the replicas and over the devices of each."""

    dimension: int
    inner: InnerSpec


# Two weights of one shape may lie along different dimensions. A gradient is to lie as
# the results do that are made of it, element by element.
def meant_like(
    jaxpr: Jaxpr, partition: Partition, layout: Layout
) -> Mapping[Var, Along]:
    """For values of the shape of results that are made of parts how they lie."""
    origins = origins_of(partition.global_)
    found: dict[Var, Along] = {}
    for atom, along in _results(jaxpr, layout):
        pending = [atom]
        while pending:
            var = pending.pop()
            if isinstance(var, Literal) or var in found:
                continue
            found[var] = along
            pending += _alike(var, origins.get(var))
    return found


def _results(jaxpr: Jaxpr, layout: Layout) -> Iterable[tuple[Atom, Along]]:
    """The results that are divided, and then those that are made whole of parts."""
    for dimensions in (layout.outputs, layout.divisible):
        for atom, dimension, inner in zip(
            jaxpr.outvars, dimensions, layout.inner, strict=False
        ):
            if dimension is not None:
                yield atom, Along(dimension, inner)


def _alike(var: Var, eqn: Equation | None) -> list[Atom]:
    """The operands of which a value is made, element by element, by its shape."""
    if eqn is None or any(closed_jaxprs(eqn.params)):
        return []  # which of the operands of a loop or a branch are meant, none says
    return [atom for atom in eqn.invars if atom.aval.shape == var.aval.shape]


@final
@dataclasses.dataclass(frozen=True)
class LoopSum:
    """A sum of what a loop stacks, which the body of the loop can take turn by turn."""

    loop: Equation
    stacked: Var
    dimension: int
    dtypes: Sequence[DTypeLike]


@final
@dataclasses.dataclass(frozen=True)
class ReduceScatters:
    """The sums over the replicas that are divided, where the replicas' part ends."""

    sums: Mapping[Var, int]
    inner: Mapping[Var, InnerSpec]
    in_loops: Mapping[Var, LoopSum]
    of_functions: Mapping[Var, Sequence[Equation]]
    passed_over: frozenset[int]
    undivided: Mapping[Var, str]


def reduce_scatters_of(
    jaxpr: Jaxpr, partition: Partition, layout: Layout, replicas: Replicas
) -> ReduceScatters:
    """The sums that only the part outside reads, and that can be divided."""
    search = _Search(jaxpr, partition, layout, replicas)
    sums: dict[Var, int] = {}
    undivided: dict[Var, str] = {}
    for eqn in partition.per_replica:
        if is_sum_of_all(eqn, replicas):
            for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
                found = search.dimension(operand, result)
                if isinstance(found, int):
                    sums[result] = found
                else:
                    undivided[result] = found
    in_loops: dict[Var, LoopSum] = {}
    of_functions: dict[Var, Sequence[Equation]] = {}
    passed_over: set[int] = set()
    for result, dimension in sums.items():
        calls, additions = search.calls_of(result, dimension)
        if calls:
            of_functions[result] = calls
            passed_over.update(map(id, [*calls, *additions]))
            continue
        found = search.loop_of(result, dimension)
        if found is not None:
            in_loops[result], conversions = found
            passed_over.update(map(id, conversions))
    needless = frozenset(passed_over)
    inner = {var: search.inner(var) for var in sums}
    return ReduceScatters(sums, inner, in_loops, of_functions, needless, undivided)


def is_sum_of_all(eqn: Equation, replicas: Replicas) -> bool:
    """Whether an equation is the sum over all replicas of its operands."""
    if effect_of(eqn) is not Effect.SUM or eqn.params.get("axis_index_groups"):
        return False
    return set(eqn.params["axes"]) == set(replicas.collective_axes)


_SCALING = frozenset(("div", "mul", "convert_element_type"))


class _Search:
    def __init__(
        self, jaxpr: Jaxpr, partition: Partition, layout: Layout, replicas: Replicas
    ) -> None:
        self._partition = partition
        self._replicas = replicas
        self._like = {tuple(v.aval.shape): d for v, d in layout.inputs.items()}
        self._results = jaxpr.outvars
        self._meant = meant_like(jaxpr, partition, layout)
        self._origins = origins_of(jaxpr.eqns)
        self._uses = uses_of(jaxpr.eqns)

    def dimension(self, operand: Atom, result: Var) -> int | str:
        """The dimension along which a sum is divided, or why it is not."""
        if self._is_pack(operand, result):
            return "arrays were joined to be summed at once"
        if result in self._meant:
            found = self._meant[result].dimension
        elif (found := self._like.get(tuple(result.aval.shape))) is None:
            sharding = self._replicas.usual_division(result.aval)
            if (found := sharding.dimension) is None:
                return sharding.reason
        if result in self._partition.read_per_replica:
            return "the replicas compute with it"
        if result not in self._partition.read_globally:
            return "it is returned as it is"
        return found

    def inner(self, result: Var) -> InnerSpec:
        """How the devices of a replica divide a sum."""
        return self._meant[result].inner if result in self._meant else WHOLE

    def _is_pack(self, operand: Atom, result: Var) -> bool:
        """Whether arrays were joined to be summed, and are cut apart again."""
        cutting = ("slice", "dynamic_slice")
        origin = None if isinstance(operand, Literal) else self._origins.get(operand)
        is_joined = origin is not None and origin.primitive.name == "concatenate"
        uses = self._uses[result]
        # A mean divides the sum before, and one of few bits is converted back.
        while len(uses) == 1 and uses[0].primitive.name in _SCALING:
            uses = self._uses[uses[0].outvars[0]]
        return is_joined and all(eqn.primitive.name in cutting for eqn in uses)

    def calls_of(
        self, result: Var, dimension: int
    ) -> tuple[list[Equation], list[Equation]]:
        """The equations that make a sum's summands of few rows, and how they are added.

        Each may be converted to the type of the sum, before it is added. None if
        something else is summed as well, or along another dimension.
        """
        eqn = self._origins[result]
        calls, additions = list[Equation](), list[Equation]()
        pending: list[Atom] = [eqn.invars[list(eqn.outvars).index(result)]]
        while pending:
            origin = self._only_used_once(pending.pop())
            if origin is not None and origin.primitive.name == "convert_element_type":
                additions.append(origin)
                origin = self._only_used_once(origin.invars[0])
                if origin is None or not self._adds_few_rows(origin):
                    return [], []
            if origin is not None and not dimension and self._adds_few_rows(origin):
                calls.append(origin)
            elif origin is not None and origin.primitive.name in ("add", "add_any"):
                additions.append(origin)
                pending += origin.invars
            else:
                return [], []
        return calls, additions

    def _adds_few_rows(self, eqn: Equation) -> bool:
        if not adds_few_rows(eqn, self._replicas.parts):
            return False
        table = eqn.invars[0]
        filled = None if isinstance(table, Literal) else self._origins.get(table)
        if filled is None or filled.primitive.name != "broadcast_in_dim":
            return False
        value = filled.invars[0]
        return isinstance(value, Literal) and value.val == 0

    def loop_of(
        self, result: Var, dimension: int
    ) -> tuple[LoopSum, list[Equation]] | None:
        """The loop that makes what is summed, and the conversions in between."""
        eqn = self._origins[result]
        var = eqn.invars[list(eqn.outvars).index(result)]
        conversions: list[Equation] = []
        while (origin := self._only_used_once(var)) is not None:
            if origin.primitive.name == "scan":
                return self._loop_sum(origin, var, dimension, conversions)
            if origin.primitive.name != "convert_element_type":
                return None
            conversions.append(origin)
            var = origin.invars[0]
        return None

    def _loop_sum(
        self,
        loop: Equation,
        var: Var,
        dimension: int,
        conversions: list[Equation],
    ) -> tuple[LoopSum, list[Equation]] | None:
        _, n_carry = scan_counts(loop)
        # Along the first dimension are the turns of the loop.
        if dimension == 0 or list(loop.outvars).index(var) < n_carry:
            return None
        dtypes = [each.params["new_dtype"] for each in reversed(conversions)]
        return LoopSum(loop, var, dimension, dtypes), conversions

    def _only_used_once(self, var: Atom) -> Equation | None:
        """The equation that makes `var`, if one other alone reads it."""
        if isinstance(var, Literal) or len(self._uses[var]) != 1:
            return None
        if any(atom is var for atom in self._results):
            return None
        return self._origins.get(var)
