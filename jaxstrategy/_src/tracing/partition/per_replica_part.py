"""The part of a step that each replica computes: `PerReplicaPart`."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import Literal
from jax.ref import AbstractRef

from jaxstrategy._src.reductions.rows import ShardFunction, part_of_sum
from jaxstrategy._src.replicas.inner_axes import WHOLE, InnerSpec, of_versions
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing.jaxprs import (
    ArrayType,
    Atom,
    Equation,
    Run,
    Var,
    closed,
    in_runs,
    rewritten_function,
    scan_counts,
)
from jaxstrategy._src.tracing.numbered_prints import on_each_device
from jaxstrategy._src.tracing.partition.global_part import (
    ReduceScatters,
    is_sum_of_all,
)
from jaxstrategy._src.tracing.partition.partition import shard_function
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
        self._reduce_scatters = reduce_scatters
        self._varies = varies
        self._replicas = replicas
        self._dimensions = dict(parts)
        self.inner = {**inner, **reduce_scatters.inner}
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
        updates = self._reduce_scatters.row_updates
        read = (update for var in eqn.outvars for update in updates.get(var, ()))
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
        return {**self._dimensions, **self._reduce_scatters.sums}

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
            sums = self._reduce_scatters.sums
            return self._sum(eqn) if any(var in sums for var in eqn.outvars) else None
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
        in_loops = self._reduce_scatters.in_loops
        sums = {var: each for var, each in in_loops.items() if each.loop is eqn}
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
            dimension = sums[result].dimension - 1
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
        reduce_scatters = self._reduce_scatters
        pairs = [
            (operand, result)
            for operand, result in zip(eqn.invars, eqn.outvars, strict=True)
            if result not in reduce_scatters.in_loops
        ]
        for operand, result in pairs:
            if result in reduce_scatters.row_updates:
                for update in reduce_scatters.row_updates[result]:
                    self._gather(eqn, update.invars)
                continue
            if result in reduce_scatters.sums:
                self._add_exchange("reduce_scatter", result, eqn)
            self._gather(eqn, [operand])

        def total_of(operand: Atom, result: Var, values: ReplicaValues) -> jax.Array:
            if updates := reduce_scatters.row_updates.get(result):
                parts = [_part_of_sum(each, result, values) for each in updates]
                return values.sum_on_device(functools.reduce(operator.add, parts))
            array = values.whole(operand)
            if (dimension := reduce_scatters.sums.get(result)) is not None:
                return values.reduce_scatter(array, dimension, result)
            return values.all_reduce(array)

        def evaluate(values: ReplicaValues) -> None:
            for operand, result in pairs:
                values.keep([result], [total_of(operand, result, values)])

        return evaluate

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
