"""The part of a step that each replica computes: `PerReplicaPart`."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import Literal
from jax.ref import AbstractRef
from jax.typing import DTypeLike

from jaxstrategy._src.reductions.rows import ShardFunction, part_of_sum
from jaxstrategy._src.replicas.inner_axes import WHOLE, InnerSpec, of_versions
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing.jaxprs import (
    ArrayType,
    Atom,
    Effect,
    Equation,
    Jaxpr,
    Run,
    Var,
    closed,
    closed_jaxprs,
    effect_of,
    in_runs,
    origins_of,
    rewritten_function,
    scan_counts,
    uses_of,
)
from jaxstrategy._src.tracing.numbered_prints import on_each_device
from jaxstrategy._src.tracing.partition.layout import Layout
from jaxstrategy._src.tracing.partition.partition import Partition, shard_function
from jaxstrategy._src.values.arrays import Function, Leaf


@final
class ReplicaValues:
    """The values of one replica while it is evaluated, and collectives for its parts.

    Args:
      whole: the arrays that it has whole.
      parts: those that it has a part of.
    """

    def __init__(
        self,
        whole: dict[Var, Leaf],
        parts: dict[Var, Leaf],
        of: PerReplicaPart,
        replicas: Replicas,
    ) -> None:
        self._whole = whole
        self.parts = parts
        self.axes = replicas.part_axes
        self._of = of
        self._replicas = replicas

    def whole(self, atom: Atom) -> Leaf:
        """The whole value; a sharded one is gathered, once."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self._whole:
            dimension = self._of.dimensions[atom]
            self._whole[atom] = self.all_gather(self.parts[atom], dimension, atom)
        return self._whole[atom]

    def keep(self, variables: Sequence[Var], values: Sequence[Leaf]) -> None:
        """Stores results, which are whole unless they are to be sharded."""
        for var, value in zip(variables, values, strict=True):
            known = self.parts if var in self._of.dimensions else self._whole
            known[var] = value

    def all_gather(
        self, part: jax.Array, dimension: int, var: Var, in_loop: bool = False
    ) -> jax.Array:
        def gather(part: jax.Array) -> jax.Array:
            return lax.all_gather(part, self.axes, axis=dimension, tiled=True)

        return self._on_devices(gather, var, in_loop)(part)

    def reduce_scatter(
        self, array: jax.Array, dimension: int, var: Var, in_loop: bool = False
    ) -> jax.Array:
        def scatter(array: jax.Array) -> jax.Array:
            return lax.psum_scatter(
                self.sum_on_device(array),
                self.axes,
                scatter_dimension=dimension,
                tiled=True,
            )

        return self._on_devices(scatter, var, in_loop)(array)

    def all_reduce(self, array: jax.Array) -> jax.Array:
        return lax.psum(array, self._replicas.axes)

    def sum_on_device(self, array: jax.Array) -> jax.Array:
        """The sum of the arrays of those replicas that share a device."""
        shared = self._replicas.sharing_axes
        return lax.psum(array, shared) if shared else array

    def _on_devices(self, function: Function, var: Var, in_loop: bool) -> Function:
        """`function` on each device's part of a replica's array.

        Otherwise XLA would first gather the array on each device (JAX 0.10 and 0.12).
        """
        inner = self._of.inner.get(var, WHOLE)
        inner = of_versions(inner) if in_loop else inner
        return (
            on_each_device(function, inner, self._replicas) if any(inner) else function
        )


Evaluation: TypeAlias = Callable[[ReplicaValues], None]
"""Computes values from others."""


# Beside automatic axes JAX lowers `axis_index` to a `shard_map`, on the mesh where the
# equation was traced (JAX 0.10 and 0.12). A step with sharded state is traced without a
# mesh: its loops, branches and calls would raise "The context mesh cannot be empty".
def retrace_axis_indices(fn: Function) -> Function:
    """`fn` with each `axis_index` traced again, on the current mesh."""

    def rule(eqn: Equation) -> Function | None:
        if eqn.primitive.name != "axis_index":
            return None
        return lambda: [eqn.primitive.bind(**eqn.params)]

    return rewritten_function(fn, rule)


@final
@dataclasses.dataclass(frozen=True)
class Exchange:
    """One gather or scatter for sharded state."""

    kind: str
    var: Var
    type: ArrayType
    loop: Equation | None
    before: Equation


@final
class PerReplicaPart:
    """Evaluates the equations of each replica, which has parts of sharded arrays."""

    def __init__(
        self,
        eqns: Sequence[Equation],
        parts: Mapping[Var, int],
        inner: Mapping[Var, InnerSpec],
        reduce_scatters: ReduceScatters,
        outputs: Iterable[Var],
        replicas: Replicas,
        varies: Callable[[Atom], bool],
    ) -> None:
        self._sums = reduce_scatters.sums
        self._varies = varies
        self._replicas = replicas
        self._dimensions = dict(parts)
        self.inner = {**inner, **{v: x.spec.inner for v, x in self._sums.items()}}
        self.exchanges: list[Exchange] = []
        self.functions: dict[int, ShardFunction] = {}
        self._gathered: set[Var] = set()
        evaluations: dict[int, Evaluation] = {}
        evaluated = [eqn for eqn in eqns if id(eqn) not in reduce_scatters.skipped]
        for eqn in evaluated:
            if (evaluation := self._evaluation_of_parts(eqn)) is not None:
                evaluations[id(eqn)] = evaluation
            else:
                self._gather(eqn, eqn.invars)
        runs = in_runs(
            evaluated, lambda eqn: id(eqn) in evaluations, outputs, self._operands
        )
        self._evaluations = [
            _evaluate_run(each) if isinstance(each, Run) else evaluations[id(each)]
            for each in runs
        ]

    def _operands(self, eqn: Equation) -> Iterator[Atom]:
        """What the evaluation of an equation reads."""
        sums = (self._sums[var] for var in eqn.outvars if var in self._sums)
        read = (update for each in sums for update in each.updates)
        return (atom for each in (eqn, *read) for atom in each.invars)

    def evaluate(self, inputs: Mapping[Var, Leaf]) -> ReplicaValues:
        """All values, given the inputs or the replica's parts of them."""
        parts = {var: x for var, x in inputs.items() if var in self._dimensions}
        whole = {var: x for var, x in inputs.items() if var not in parts}
        values = ReplicaValues(whole, parts, self, self._replicas)
        for evaluation in self._evaluations:
            evaluation(values)
        return values

    @functools.cached_property
    def dimensions(self) -> Mapping[Var, int]:
        """The dimension of each sharded value."""
        of_sums = {var: each.spec.dimension for var, each in self._sums.items()}
        return {**self._dimensions, **of_sums}

    def _evaluation_of_parts(self, eqn: Equation) -> Evaluation | None:
        """The evaluation of an equation that works on parts; None of others."""
        parts = {
            place: self._dimensions[atom]
            for place, atom in enumerate(eqn.invars)
            if self._is_part(atom)
        }
        if parts and eqn.primitive.name == "convert_element_type":
            return self._conversion(eqn)
        if eqn.primitive.name == "scan":
            return self._loop(eqn, parts)
        if (function := shard_function(eqn)) is not None:
            # Shards of a varying array would be shards of different arrays.
            varies = function.are_rest_equal and any(map(self._varies, eqn.invars))
            if not varies and all(parts.get(i) == 0 for i in function.divided):
                return self._call(eqn, function)
        if parts and _is_rematerialization(eqn):
            return self._rematerialization(eqn, parts)
        if is_sum_of_all(eqn, self._replicas):
            is_scattered = any(var in self._sums for var in eqn.outvars)
            return self._sum(eqn) if is_scattered else None
        return None

    def _is_part(self, atom: Atom) -> bool:
        return not isinstance(atom, Literal) and atom in self._dimensions

    def _evaluation(
        self,
        eqn: Equation,
        sharded: Container[int],
        function: Callable[[ReplicaValues, list[Leaf]], Sequence[Leaf]],
        results: Sequence[Var],
    ) -> Evaluation:
        """Computes `results` from parts of some operands, and the others whole."""
        self._gather(eqn, (a for i, a in enumerate(eqn.invars) if i not in sharded))

        def evaluate(values: ReplicaValues) -> None:
            operands = [
                values.parts[atom] if index in sharded else values.whole(atom)
                for index, atom in enumerate(eqn.invars)
            ]
            values.keep(results, function(values, operands))

        return evaluate

    def _conversion(self, eqn: Equation) -> Evaluation:
        """Converts the part before it is gathered, which is usually fewer bytes."""
        (operand,), (result,) = eqn.invars, eqn.outvars
        self._dimensions[result] = self._dimensions[operand]
        self.inner[result] = self.inner.get(operand, WHOLE)
        dtype = eqn.params["new_dtype"]

        def converted(_: ReplicaValues, operands: list[Leaf]) -> list[Leaf]:
            return [lax.convert_element_type(operands[0], dtype)]

        return self._evaluation(eqn, {0}, converted, eqn.outvars)

    def _call(self, eqn: Equation, function: ShardFunction) -> Evaluation:
        self.functions[id(eqn)] = function
        self._dimensions.update((eqn.outvars[i], 0) for i in function.returns_divided)

        def called(values: ReplicaValues, operands: list[Leaf]) -> list[Leaf]:
            return jax.tree.leaves(function.of_parts(*operands, axes=values.axes))

        return self._evaluation(eqn, function.divided, called, eqn.outvars)

    # The forward pass has gathered them; they are gathered again rather than kept.
    def _rematerialization(self, eqn: Equation, parts: Mapping[int, int]) -> Evaluation:
        function = core.jaxpr_as_fun(closed(eqn.params["jaxpr"]))
        for index in parts:
            self._add_exchange("all_gather", eqn.invars[index], eqn)

        def computed(values: ReplicaValues, operands: list[Leaf]) -> Sequence[Leaf]:
            # As JAX does for `checkpoint`: keeps XLA from merging it with the first
            # time.
            operands = lax.optimization_barrier(operands)
            whole = [
                values.all_gather(x, parts[i], eqn.invars[i]) if i in parts else x
                for i, x in enumerate(operands)
            ]
            return function(*whole)

        return self._evaluation(eqn, parts, computed, eqn.outvars)

    def _loop(self, eqn: Equation, parts: Mapping[int, int]) -> Evaluation | None:
        """A loop that gathers its inputs and scatters sums in each iteration."""
        n_consts, n_carry = scan_counts(eqn)
        first = n_consts + n_carry
        # The first dimension is that of the iterations.
        layers = {i: d for i, d in parts.items() if i >= first and d > 0}
        sums = {
            var: each.in_loop
            for var, each in self._sums.items()
            if each.in_loop is not None and each.in_loop.loop is eqn
        }
        if not layers and not sums:
            return None
        for index in layers:
            self._add_exchange("all_gather", eqn.invars[index], eqn, loop=eqn)
        for result in sums:
            self._add_exchange("reduce_scatter", result, eqn, loop=eqn)
        function = core.jaxpr_as_fun(eqn.params["jaxpr"])
        outvars = list(eqn.outvars)
        # By the index of the output.
        summed = {outvars.index(each.stacked): result for result, each in sums.items()}
        names = ("length", "reverse", "unroll", "_split_transpose")
        options = {name: eqn.params[name] for name in names if name in eqn.params}

        def scattered(values: ReplicaValues, array: jax.Array, result: Var) -> Leaf:
            for dtype in sums[result].dtypes:
                array = lax.convert_element_type(array, dtype)
            dimension = self._sums[result].spec.dimension - 1
            return values.reduce_scatter(array, dimension, result, in_loop=True)

        def looped(values: ReplicaValues, operands: list[Leaf]) -> list[Leaf]:
            def body(carry: list[Leaf], layer: list[Leaf]) -> tuple[Any, list[Leaf]]:
                whole = [
                    values.all_gather(x, layers[i] - 1, eqn.invars[i], in_loop=True)
                    if i in layers
                    else x
                    for i, x in enumerate(layer, start=first)
                ]
                results = function(*operands[:n_consts], *carry, *whole)
                stacked = [
                    scattered(values, x, summed[i]) if i in summed else x
                    for i, x in enumerate(results[n_carry:], start=n_carry)
                ]
                return results[:n_carry], stacked

            carry, stacked = lax.scan(
                body, operands[n_consts:first], operands[first:], **options
            )
            return [*carry, *stacked]

        results = [summed.get(i, var) for i, var in enumerate(outvars)]
        return self._evaluation(eqn, layers, looped, results)

    def _sum(self, eqn: Equation) -> Evaluation:
        pairs = zip(eqn.invars, eqn.outvars, strict=True)
        totals = [(var, self._total(eqn, atom, var)) for atom, var in pairs]

        def evaluate(values: ReplicaValues) -> None:
            for result, total in totals:
                if total is not None:
                    values.keep([result], [total(values)])

        return evaluate

    def _total(
        self, eqn: Equation, operand: Atom, result: Var
    ) -> Callable[[ReplicaValues], Leaf] | None:
        """Computes one result of a sum; None if a loop does."""
        scattered = self._sums.get(result)
        if scattered is None:
            self._gather(eqn, [operand])
            return lambda values: values.all_reduce(values.whole(operand))
        if scattered.in_loop is not None:
            return None
        if updates := scattered.updates:
            self._gather(eqn, (atom for each in updates for atom in each.invars))

            def of_rows(values: ReplicaValues) -> Leaf:
                parts = [_part_of_sum(each, result, values) for each in updates]
                return values.sum_on_device(functools.reduce(operator.add, parts))

            return of_rows
        self._add_exchange("reduce_scatter", result, eqn)
        self._gather(eqn, [operand])
        dimension = scattered.spec.dimension
        return lambda x: x.reduce_scatter(x.whole(operand), dimension, result)

    def _gather(self, eqn: Equation, atoms: Iterable[Atom]) -> None:
        """Adds gathers, before an equation, of what it needs whole."""
        for atom in atoms:
            if self._is_part(atom) and atom not in self._gathered:
                self._gathered.add(atom)
                self._add_exchange("all_gather", atom, eqn)

    def _add_exchange(
        self, kind: str, var: Atom, before: Equation, loop: Equation | None = None
    ) -> None:
        self.exchanges.append(Exchange(kind, var, var.aval, loop, before))


def _is_rematerialization(eqn: Equation) -> bool:
    params = eqn.params
    is_remat = eqn.primitive.name == "remat2" and params.get("differentiated")
    has_refs = any(isinstance(atom.aval, AbstractRef) for atom in eqn.invars)
    return bool(is_remat and params.get("prevent_cse") and not has_refs)


def _part_of_sum(update: Equation, result: Var, values: ReplicaValues) -> jax.Array:
    """This replica's part of the sum of tables to which each replica adds rows."""
    table, *rows = update.invars
    operands, dtype = map(values.whole, rows), result.aval.dtype
    return part_of_sum(table.aval.shape, *operands, axes=values.axes, dtype=dtype)


def _evaluate_run(run: Run) -> Evaluation:
    def evaluate(values: ReplicaValues) -> None:
        values.keep(run.outputs, run.function(*map(values.whole, run.inputs)))

    return evaluate


# Sums that only the global part reads.


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
    dtypes: Sequence[DTypeLike]


@final
@dataclasses.dataclass(frozen=True)
class ScatteredSum:
    """A sum of which each replica needs its part only."""

    spec: StateSpec
    updates: Sequence[Equation] = ()  # the summands, if they add few rows to zeros
    in_loop: LoopSum | None = None


@final
@dataclasses.dataclass(frozen=True)
class ReduceScatters:
    """The all-reduces of a step that become reduce-scatters."""

    sums: dict[Var, ScatteredSum]
    skipped: set[int]  # by `id`, equations that are evaluated within others
    reasons: dict[Var, str]  # of sums that stay all-reduces


def reduce_scatters_of(
    jaxpr: Jaxpr, partition: Partition, layout: Layout, replicas: Replicas
) -> ReduceScatters:
    """Finds the sums that only the global part reads, and that can be scattered."""
    search = _Search(jaxpr, partition, layout, replicas)
    found = ReduceScatters({}, set(), {})
    for eqn in partition.per_replica:
        if is_sum_of_all(eqn, replicas):
            for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
                search.add(found, operand, result)
    return found


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

    def add(self, found: ReduceScatters, operand: Atom, result: Var) -> None:
        """Adds a sum to those that are scattered, or why it stays an all-reduce."""
        spec = self._spec(operand, result)
        if isinstance(spec, str):
            found.reasons[result] = spec
            return
        updates, skipped = self._row_updates_of(result, spec.dimension)
        in_loop = None
        if updates:
            skipped += updates
        elif (loop := self._loop_of(result, spec.dimension)) is not None:
            in_loop, skipped = loop
        found.sums[result] = ScatteredSum(spec, updates, in_loop)
        found.skipped.update(map(id, skipped))

    def _spec(self, operand: Atom, result: Var) -> StateSpec | str:
        if self._is_pack(operand, result):
            return "arrays were joined to be summed at once"
        if (spec := self._specs.get(result)) is None:
            dimension = self._by_shape.get(tuple(result.aval.shape))
            if dimension is None:
                sharding = self._replicas.usual_division(result.aval)
                if (dimension := sharding.dimension) is None:
                    return sharding.reason
            spec = StateSpec(dimension, WHOLE)
        if result in self._partition.read_per_replica:
            return "the replicas compute with it"
        if result not in self._partition.read_globally:
            return "it is returned as it is"
        return spec

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

    def _row_updates_of(
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

    def _loop_of(
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
        return LoopSum(loop, var, dtypes), conversions

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
