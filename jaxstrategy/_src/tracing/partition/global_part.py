"""The part computed once for all replicas, and all-reduces that need only scatter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias, final

from jax import lax
from jax.extend.core import Literal
from jax.typing import DTypeLike

from jaxstrategy._src.replicas.inner_axes import WHOLE, InnerSpec
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing.jaxprs import (
    ArrayType,
    Atom,
    Effect,
    Equation,
    Jaxpr,
    Var,
    callee,
    closed_jaxprs,
    effect_of,
    origins_of,
    plain,
    scan_counts,
    uses_of,
)
from jaxstrategy._src.tracing.partition.layout import Layout
from jaxstrategy._src.tracing.partition.partition import Partition

Dimension: TypeAlias = int | None
"""The dimension along which a value is sharded; None: it is replicated."""

UNKNOWN: Final = -1
"""XLA chooses the sharding."""


def result_dimensions(eqn: Equation, operands: Sequence[Dimension]) -> list[Dimension]:
    """How the results of `eqn` are sharded, given its operands."""
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return [*operands]
    (dimension, *others) = {d for d in operands if d is not None}
    if others or (operands[0] is None and name not in _ELEMENTWISE):
        dimension = UNKNOWN
    elif name in _ELEMENTWISE:
        pass
    elif _is_reduction(eqn):
        axes = eqn.params["axes"]
        is_sum = dimension in axes
        dimension = None if is_sum else dimension - sum(a < dimension for a in axes)
    else:
        rule = _RULES.get(name)
        dimension = UNKNOWN if rule is None else rule(eqn, dimension)
    return [dimension for _ in eqn.outvars]


def _is_reduction(eqn: Equation) -> bool:
    return "axes" in eqn.params and eqn.primitive.name.startswith(("reduce_", "arg"))


def _reshaped(eqn: Equation, dimension: int) -> int:
    """The dimension of the same length with as many elements before it."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    for place, length in enumerate(after):
        is_same = math.prod(after[:place]) == math.prod(before[:dimension])
        if is_same and length == before[dimension]:
            return place
    return UNKNOWN


_RULES: dict[str, Callable[[Equation, int], int]] = {
    "broadcast_in_dim": lambda eqn, d: eqn.params["broadcast_dimensions"][d],
    "transpose": lambda eqn, d: eqn.params["permutation"].index(d),
    "squeeze": lambda eqn, d: d - sum(i < d for i in eqn.params["dimensions"]),
    "reshape": _reshaped,
}
_ELEMENTWISE = frozenset(
    (
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan",
        "atan2", "atanh", "bitcast_convert_type", "cbrt", "ceil", "clamp", "complex",
        "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma",
        "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge",
        "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p",
        "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or",
        "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt",
        "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
        "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
        "xor",
    )
)  # fmt: skip


@final
@dataclasses.dataclass(frozen=True)
class GlobalExchange:
    """A collective that XLA inserts to compute an equation from parts."""

    kind: str
    type: ArrayType
    eqns: tuple[Equation, ...]


# XLA partitions the global part: elementwise operations keep the sharding of operands,
# others need collectives. Those for sums and replicated results are known; for matrix
# products and sorts XLA chooses by its own cost estimates.
@final
class GlobalPart:
    """Predicts how XLA shards the equations that are computed once for all."""

    def __init__(
        self,
        eqns: Sequence[Equation],
        parts: Mapping[Var, int],
        replicated: Collection[Atom],
    ) -> None:
        self.exchanges: list[GlobalExchange] = []
        self.undecided: list[tuple[Equation, ...]] = []
        self._known: dict[Var, Dimension] = dict(parts)
        self._replicated = replicated
        self._gathered: dict[Var, Dimension] = {}
        self._propagate(eqns, self._known, ())

    def dimension(self, atom: Atom) -> Dimension:
        """The dimension along which a value is sharded before it is gathered."""
        if isinstance(atom, Literal):
            return None
        return self._gathered.get(atom, self._known.get(atom))

    def is_whole(self, atom: Atom) -> bool:
        """Whether each device has all of a value without any collective."""
        return self.dimension(atom) is None

    def _propagate(
        self,
        eqns: Iterable[Equation],
        known: dict[Var, Dimension],
        holders: tuple[Equation, ...],
    ) -> None:
        for eqn in eqns:
            operands = [_read(known, atom) for atom in eqn.invars]
            if any(dimension is not None for dimension in operands):
                results = self._results(eqn, operands, holders)
                known.update(zip(eqn.outvars, results, strict=True))
                for var in eqn.outvars:
                    if var in self._replicated and known[var] != UNKNOWN:
                        self._gathered[var], known[var] = known[var], None

    def _results(
        self, eqn: Equation, operands: list[Dimension], holders: tuple[Equation, ...]
    ) -> list[Dimension]:
        inner = (eqn, *holders)
        if (called := callee(eqn)) is not None:
            return self._called(plain(called), operands, inner)
        if eqn.primitive.name == "cond":
            branches = eqn.params["branches"]
            each = [self._called(plain(b), operands[1:], inner) for b in branches]
            return [_joined(dimensions) for dimensions in zip(*each, strict=True)]
        if UNKNOWN in operands:
            return [UNKNOWN if var.aval.shape else None for var in eqn.outvars]
        results = result_dimensions(eqn, operands)
        if None in results and _is_reduction(eqn):
            self.exchanges += (
                GlobalExchange("all_reduce", var.aval, inner) for var in eqn.outvars
            )
        if UNKNOWN in results:
            self.undecided.append(inner)
        return results

    def _called(
        self, jaxpr: Jaxpr, operands: list[Dimension], holders: tuple[Equation, ...]
    ) -> list[Dimension]:
        known: dict[Var, Dimension] = dict(zip(jaxpr.invars, operands, strict=True))
        self._propagate(jaxpr.eqns, known, holders)
        return [_read(known, atom) for atom in jaxpr.outvars]


def _read(known: Mapping[Var, Dimension], atom: Atom) -> Dimension:
    return None if isinstance(atom, Literal) else known.get(atom)


def _joined(dimensions: Sequence[Dimension]) -> Dimension:
    """The sharding of a result of several branches."""
    sharded = {dimension for dimension in dimensions if dimension is not None}
    return sharded.pop() if len(sharded) == 1 else (UNKNOWN if sharded else None)


@final
@dataclasses.dataclass(frozen=True)
class StateSpec:
    """How a value is sharded over the replicas and over the devices of each."""

    dimension: int
    inner: InnerSpec


# Two weights of one shape may be sharded along different dimensions. A gradient gets
# the sharding of the results that are computed from it element by element.
def propagate_output_specs(
    jaxpr: Jaxpr, partition: Partition, layout: Layout
) -> Mapping[Var, StateSpec]:
    """Propagates the shardings of results to values of the same shape before them."""
    origins = origins_of(partition.global_)
    specs: dict[Var, StateSpec] = {}
    for atom, spec in _result_specs(jaxpr, layout):
        pending = [atom]
        while pending:
            var = pending.pop()
            if isinstance(var, Literal) or var in specs:
                continue
            specs[var] = spec
            pending += _same_shape_operands(var, origins.get(var))
    return specs


def _result_specs(jaxpr: Jaxpr, layout: Layout) -> Iterable[tuple[Atom, StateSpec]]:
    """The sharded results, and then the replicated ones that are shardable."""
    for dimensions in (layout.outputs, layout.shardable):
        for atom, dimension, inner in zip(
            jaxpr.outvars, dimensions, layout.inner, strict=False
        ):
            if dimension is not None:
                yield atom, StateSpec(dimension, inner)


def _same_shape_operands(var: Var, eqn: Equation | None) -> list[Atom]:
    if eqn is None or any(closed_jaxprs(eqn.params)):
        return []  # unknown for loops and branches
    return [atom for atom in eqn.invars if atom.aval.shape == var.aval.shape]


@final
@dataclasses.dataclass(frozen=True)
class LoopSum:
    """A sum of a stacked output of a loop, to be computed in the body of the loop."""

    loop: Equation
    stacked: Var
    dimension: int
    dtypes: Sequence[DTypeLike]


@final
@dataclasses.dataclass(frozen=True)
class ReduceScatters:
    """The all-reduces of a step that become reduce-scatters."""

    sums: Mapping[Var, int]  # with the dimension to scatter
    inner: Mapping[Var, InnerSpec]
    in_loops: Mapping[Var, LoopSum]
    row_updates: Mapping[Var, Sequence[Equation]]  # the summands add few rows to zeros
    skipped: frozenset[int]  # by `id`, equations that are evaluated within others
    reasons: Mapping[Var, str]  # of sums that stay all-reduces


def reduce_scatters_of(
    jaxpr: Jaxpr, partition: Partition, layout: Layout, replicas: Replicas
) -> ReduceScatters:
    """Finds the sums that only the global part reads, and that can be scattered."""
    search = _Search(jaxpr, partition, layout, replicas)
    sums: dict[Var, int] = {}
    reasons: dict[Var, str] = {}
    for eqn in partition.per_replica:
        if is_sum_of_all(eqn, replicas):
            for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
                dimension = search.dimension(operand, result)
                if isinstance(dimension, int):
                    sums[result] = dimension
                else:
                    reasons[result] = dimension
    in_loops: dict[Var, LoopSum] = {}
    row_updates: dict[Var, Sequence[Equation]] = {}
    skipped: set[int] = set()
    for result, dimension in sums.items():
        updates, additions = search.row_updates_of(result, dimension)
        if updates:
            row_updates[result] = updates
            skipped.update(map(id, [*updates, *additions]))
        elif (found := search.loop_of(result, dimension)) is not None:
            in_loops[result], conversions = found
            skipped.update(map(id, conversions))
    inner = {var: search.inner(var) for var in sums}
    return ReduceScatters(
        sums, inner, in_loops, row_updates, frozenset(skipped), reasons
    )


def is_sum_of_all(eqn: Equation, replicas: Replicas) -> bool:
    """Whether an equation sums its operands over all replicas."""
    if effect_of(eqn) is not Effect.SUM or eqn.params.get("axis_index_groups"):
        return False
    return set(eqn.params["axes"]) == set(replicas.axes)


_SCALING = frozenset(("div", "mul", "convert_element_type"))


class _Search:
    def __init__(
        self, jaxpr: Jaxpr, partition: Partition, layout: Layout, replicas: Replicas
    ) -> None:
        self._partition = partition
        self._replicas = replicas
        self._by_shape = {tuple(v.aval.shape): d for v, d in layout.inputs.items()}
        self._results = jaxpr.outvars
        self._specs = propagate_output_specs(jaxpr, partition, layout)
        self._origins = origins_of(jaxpr.eqns)
        self._uses = uses_of(jaxpr.eqns)

    def dimension(self, operand: Atom, result: Var) -> int | str:
        """The dimension along which to scatter a sum, or why it stays an all-reduce."""
        if self._is_pack(operand, result):
            return "arrays were joined to be summed at once"
        if result in self._specs:
            dimension = self._specs[result].dimension
        elif (dimension := self._by_shape.get(tuple(result.aval.shape))) is None:
            sharding = self._replicas.usual_division(result.aval)
            if (dimension := sharding.dimension) is None:
                return sharding.reason
        if result in self._partition.read_per_replica:
            return "the replicas compute with it"
        if result not in self._partition.read_globally:
            return "it is returned as it is"
        return dimension

    def inner(self, result: Var) -> InnerSpec:
        """How a sum is sharded over the devices of a replica."""
        return self._specs[result].inner if result in self._specs else WHOLE

    def _is_pack(self, operand: Atom, result: Var) -> bool:
        """Whether arrays are concatenated, summed and split again."""
        cutting = ("slice", "dynamic_slice")
        origin = None if isinstance(operand, Literal) else self._origins.get(operand)
        is_joined = origin is not None and origin.primitive.name == "concatenate"
        uses = self._uses[result]
        # A mean scales the sum before, and one with fewer bits is converted back.
        while len(uses) == 1 and uses[0].primitive.name in _SCALING:
            uses = self._uses[uses[0].outvars[0]]
        return is_joined and all(eqn.primitive.name in cutting for eqn in uses)

    def row_updates_of(
        self, result: Var, dimension: int
    ) -> tuple[list[Equation], list[Equation]]:
        """The summands of a sum if each adds few rows to zeros; and their additions.

        Each may be converted to the type of the sum first. Empty if there are other
        summands, or for another dimension than 0.
        """
        eqn = self._origins[result]
        updates, additions = list[Equation](), list[Equation]()
        pending: list[Atom] = [eqn.invars[list(eqn.outvars).index(result)]]
        while pending:
            origin = self._origin_if_read_once(pending.pop())
            if origin is not None and origin.primitive.name == "convert_element_type":
                additions.append(origin)
                origin = self._origin_if_read_once(origin.invars[0])
                if origin is None or not self._adds_few_rows(origin):
                    return [], []
            if origin is not None and not dimension and self._adds_few_rows(origin):
                updates.append(origin)
            elif origin is not None and origin.primitive.name in ("add", "add_any"):
                additions.append(origin)
                pending += origin.invars
            else:
                return [], []
        return updates, additions

    def _adds_few_rows(self, eqn: Equation) -> bool:
        if not _adds_few_rows(eqn, self._replicas.parts):
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
        """The loop whose output is summed, and the conversions in between."""
        eqn = self._origins[result]
        var = eqn.invars[list(eqn.outvars).index(result)]
        conversions: list[Equation] = []
        while (origin := self._origin_if_read_once(var)) is not None:
            if origin.primitive.name == "scan":
                return self._loop_sum(origin, var, dimension, conversions)
            if origin.primitive.name != "convert_element_type":
                return None
            conversions.append(origin)
            var = origin.invars[0]
        return None

    def _loop_sum(
        self, loop: Equation, var: Var, dimension: int, conversions: list[Equation]
    ) -> tuple[LoopSum, list[Equation]] | None:
        _, n_carry = scan_counts(loop)
        # Along the first dimension are the turns of the loop.
        if dimension == 0 or list(loop.outvars).index(var) < n_carry:
            return None
        dtypes = [each.params["new_dtype"] for each in reversed(conversions)]
        return LoopSum(loop, var, dimension, dtypes), conversions

    def _origin_if_read_once(self, var: Atom) -> Equation | None:
        """The equation that computes `var`, if only one other reads it."""
        if isinstance(var, Literal) or len(self._uses[var]) != 1:
            return None
        if any(atom is var for atom in self._results):
            return None
        return self._origins.get(var)


def _adds_few_rows(eqn: Equation, parts: int) -> bool:
    """Whether an equation adds so few rows to a table that `part_of_sum` is cheaper.

    Such as the gradient of a lookup, which JAX adds to zeros. Few: all replicas
    together send less than the table.
    """
    if eqn.primitive.name != "scatter-add":
        return False
    table, indices, rows = (atom.aval for atom in eqn.invars)
    numbers, batch = eqn.params["dimension_numbers"], len(indices.shape) - 1
    is_of_rows = (
        tuple(numbers.update_window_dims) == tuple(range(batch, len(rows.shape)))
        and tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and not numbers.operand_batching_dims
        and rows.shape[batch:] == table.shape[1:]
    )
    is_known = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    is_known &= indices.dtype in ("int32", "int64")
    is_few = math.prod(indices.shape) * parts <= table.shape[0]
    return is_of_rows and is_known and is_few
