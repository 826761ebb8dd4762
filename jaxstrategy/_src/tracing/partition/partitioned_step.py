"""A step with state that is sharded over the replicas: `PartitionedStep`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import Literal
from jax.ref import AbstractRef
from jax.sharding import NamedSharding

from jaxstrategy._src.replicas.inner_axes import with_inner
from jaxstrategy._src.replicas.replicas import REPLICATED, STACKED, LayoutOrDimension
from jaxstrategy._src.tracing.jaxprs import (
    ArrayType,
    Atom,
    Equation,
    Jaxpr,
    Var,
    callee,
    closed,
    jaxpr_of,
    plain,
    rewritten,
    variables,
    with_values,
)
from jaxstrategy._src.tracing.numbered_prints import (
    has_prints,
    with_merges,
    with_numbered_prints,
)
from jaxstrategy._src.tracing.partition.layout import Layout, layout_of
from jaxstrategy._src.tracing.partition.partition import (
    Partition,
    inline_calls,
    partition,
    shard_function,
)
from jaxstrategy._src.tracing.partition.per_replica_part import (
    PerReplicaPart,
    ReduceScatters,
    reduce_scatters_of,
    retrace_axis_indices,
)
from jaxstrategy._src.tracing.replication.rules import evaluated
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.tracing.vmapped.replicas import on_replicas
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.access import Cell

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
    if others or (operands[0] is None and name not in _OF_ANY_OPERAND):
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


def _unless_along(name: str) -> Callable[[Equation, int], int]:
    def rule(eqn: Equation, dimension: int) -> int:
        along = jax.tree.leaves(eqn.params[name])
        return UNKNOWN if dimension in along else dimension

    return rule


def _unless_cut(eqn: Equation, dimension: int) -> int:
    shapes = [eqn.invars[0].aval.shape, *(var.aval.shape for var in eqn.outvars)]
    return dimension if len({shape[dimension] for shape in shapes}) == 1 else UNKNOWN


_RULES: dict[str, Callable[[Equation, int], int]] = {
    "broadcast_in_dim": lambda eqn, d: eqn.params["broadcast_dimensions"][d],
    "transpose": lambda eqn, d: eqn.params["permutation"].index(d),
    "squeeze": lambda eqn, d: d - sum(i < d for i in eqn.params["dimensions"]),
    "reshape": _reshaped,
    **dict.fromkeys(("slice", "dynamic_slice", "pad", "split"), _unless_cut),
    **dict.fromkeys(("concatenate", "sort"), _unless_along("dimension")),
    "rev": _unless_along("dimensions"),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _unless_along("axis")
    ),
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
_OF_ANY_OPERAND = _ELEMENTWISE | {"concatenate", "sort"}


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
class PartitionedStep:
    """A step in two parts: what each replica computes, and what is computed once."""

    def __init__(self, step: TracedStep, arguments: Sequence[Leaf]) -> None:
        self._step = step
        self.replicas = self._replicas = step.replicas
        self._has_prints = has_prints(step.jaxpr, self._replicas)
        whole = with_merges(step.jaxpr) if self._has_prints else step.jaxpr
        inlined = inline_calls(whole)
        self._constants, self._calls = inlined.constants, inlined.calls
        references = [
            index
            for index, each in enumerate(step.inputs)
            if isinstance(inlined.jaxpr.invars[index].aval, AbstractRef)
            and each.layout is REPLICATED
        ]
        self._values = with_values(inlined.jaxpr, references)
        jaxpr = self.jaxpr = self._values.jaxpr
        differs = step.differs + [False] * len(self._constants)
        proof = evaluated(jaxpr, differs, self._replicas, step.unpacking)
        # Those of the user's step, for explanations.
        self.collectives = [each for each in proof.collectives if not each.is_merge]
        self.partition: Partition = partition(
            jaxpr, proof.varies, lambda eqn: shard_function(eqn) is not None
        )
        self.layout: Layout = layout_of(step, jaxpr.invars, self.partition, arguments)
        self.reduce_scatters: ReduceScatters = reduce_scatters_of(
            jaxpr, self.partition, self.layout, self._replicas
        )
        part, count = self.partition, len(step.varies)
        results, values = jaxpr.outvars[:count], jaxpr.outvars[count:]
        same = [number for number in range(count) if not step.varies[number]]
        differ = [number for number in range(count) if step.varies[number]]
        self._varying_results = [results[number] for number in differ]
        # Results and new values of variables that are equal on all replicas.
        self._common_results = [*(results[number] for number in same), *values]
        self._used_globally = part.read_globally.union(variables(self._common_results))
        # Outputs of the per-replica part that the global part reads or returns.
        self._crossing = [
            var
            for eqn in part.per_replica
            for var in eqn.outvars
            if var in self._used_globally and var not in part.made_globally
        ]
        # The inputs that the per-replica part reads or returns.
        read = part.read_per_replica.union(variables(self._varying_results))
        self._read_per_replica = [var for var in jaxpr.invars if var in read]
        # Along which the common results are sharded, or else could be.
        inputs = self.layout.inputs
        self._dimensions = [
            *(self.layout.outputs[number] for number in same),
            *map(inputs.get, self.variables),
        ]
        self._shardable = [
            *(self.layout.shardable[number] for number in same),
            *(
                None if v in inputs else self._replicas.usual_division(v.aval).dimension
                for v in self.variables
            ),
        ]
        parts = {v: d for v, d in inputs.items() if v in part.read_per_replica}
        self.per_replica_part = PerReplicaPart(
            part.per_replica,
            parts,
            {var: self.layout.leaves[var].inner for var in parts},
            self.reduce_scatters,
            [*self._crossing, *self._varying_results],
            self._replicas,
            proof.varies,
        )

    # For explanations.

    def site(self, eqns: tuple[Equation, ...]) -> Site:
        """The location of an equation in the user's step."""
        calls = (self._calls[var] for var in eqns[-1].outvars if var in self._calls)
        return Site((*eqns, *next(calls, ())))

    @property
    def common_results(self) -> list[tuple[Atom, int | None, int | None]]:
        """Results, and last the variables' values, that are equal on all replicas.

        For each the dimension along which it is sharded, and that along which it is
        sharded before it is gathered.
        """
        first = self._sharded_first
        return list(zip(self._common_results, self._dimensions, first, strict=True))

    @property
    def variables(self) -> list[Var]:
        """The variables that are inputs and outputs instead of references."""
        return [self.jaxpr.invars[index] for index in self._values.replaced]

    @property
    def arguments(self) -> Mapping[int, int | None]:
        """The dimension along which arguments are sharded; None: replicated."""
        return self.layout.arguments

    # Evaluation.

    def evaluate(
        self,
        leaves: Sequence[Leaf],
        references: dict[Cell, jax.Ref],
    ) -> list[jax.Array | PerReplica]:
        """As `TracedStep.evaluate`, with arrays sharded as the layout says."""
        inputs = self._step.operands(leaves, references) + self._constants
        refs = {i: inputs[i] for i in self._values.replaced if inputs[i] is not None}
        for index, reference in refs.items():
            inputs[index] = reference[...]
        known: dict[Var, Leaf] = dict(zip(self.jaxpr.invars, inputs, strict=True))
        varying_results, crossing = self._per_replica(known)
        known.update(zip(self._crossing, crossing, strict=True))
        common = self._sharded(self._computed_once(known))
        count = len(self._common_results) - len(self._values.replaced)
        for index, value in zip(self._values.replaced, common[count:], strict=True):
            if index in refs:
                refs[index][...] = self._sharded_like(self.jaxpr.invars[index], value)
        varying, equal = iter(varying_results), iter(common[:count])
        results = [
            PerReplica(next(varying)) if varies else next(equal)
            for varies in self._step.varies
        ]
        return self.constrained(results)

    def _per_replica(
        self, known: dict[Var, Leaf]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The varying results, and `_crossing`."""
        read = [var for var in self._read_per_replica if known[var] is not None]

        def replica(*locals_: Leaf) -> PyTree:
            inputs: dict[Var, Leaf] = dict(zip(read, locals_, strict=True))
            values = self.per_replica_part.evaluate(inputs)
            varying = [values.whole(atom) for atom in self._varying_results]
            crossing = [
                values.parts[v] if v in values.parts else values.whole(v)
                for v in self._crossing
            ]
            # Without any output XLA would run callbacks on one device only.
            output = jnp.zeros((), jnp.int8)
            return [lax.expand_dims(x, (0,)) for x in varying], crossing, output

        replicas = self._replicas
        dimensions = self.per_replica_part.dimensions
        returned = (
            [STACKED] * len(self._varying_results),
            [dimensions.get(var, REPLICATED) for var in self._crossing],
            REPLICATED,
        )
        function = replica
        if replicas.inner_axes:
            function = retrace_axis_indices(replica)
        if self._has_prints:
            function = with_numbered_prints(function, replicas)
        pairs = zip(self.jaxpr.invars, self._step.inputs, strict=False)
        layouts: dict[Var, LayoutOrDimension] = {v: x.layout for v, x in pairs}
        layout = [self.layout.inputs.get(v, layouts.get(v, REPLICATED)) for v in read]
        run = on_replicas(function, replicas, layout, returned)
        varying, crossing, _ = run(*(known[var] for var in read))
        return varying, crossing

    def _computed_once(self, known: dict[Var, Leaf]) -> list[jax.Array]:
        """`_common_results`, computed by the global part."""
        eqns = [*self.partition.duplicated, *self.partition.global_]
        read = self._used_globally - self.partition.made_globally
        free = [var for var in known if var in read]
        jaxpr = jaxpr_of(free, eqns, self._common_results)
        if self._replicas.inner_axes:
            jaxpr = rewritten(jaxpr, self._constraint)
        return core.jaxpr_as_fun(closed(jaxpr))(*(known[var] for var in free))

    def _constraint(self, eqn: Equation) -> Function | None:
        """A constraint along inner axes, on the mesh of all replicas."""
        if eqn.primitive.name != "sharding_constraint":
            return None
        where = NamedSharding(self._replicas.mesh, eqn.params["sharding"].spec)
        return lambda array: [lax.with_sharding_constraint(array, where)]

    def _sharded(self, common: Sequence[jax.Array]) -> list[jax.Array]:
        """`_common_results`, sharded first where they are computed from parts.

        Otherwise XLA would compute the last sum on each device, from parts that it
        gathers, and round differently (JAX 0.10 and 0.12).
        """
        constraint = self._replicas.constraint_along
        return [
            array
            if dimension is None
            else lax.with_sharding_constraint(array, constraint(dimension, array.ndim))
            for array, dimension in zip(common, self._sharded_first, strict=True)
        ]

    @cached_property
    def _sharded_first(self) -> list[int | None]:
        """The dimensions along which replicated results are sharded at first."""
        return [
            None if dimension is None or self.global_part.is_whole(atom) else dimension
            for atom, dimension in zip(
                self._common_results, self._shardable, strict=True
            )
        ]

    @cached_property
    def global_part(self) -> GlobalPart:
        """The shardings of what is computed once for all replicas."""
        dimensions = {**self.layout.inputs, **self.per_replica_part.dimensions}
        parts = {v: d for v, d in dimensions.items() if v in self._used_globally}
        results = zip(
            self._common_results, self._shardable, self._dimensions, strict=True
        )
        replicated = {
            atom
            for atom, *dimensions in results
            if dimensions == [None, None] and not isinstance(atom, Literal)
        }
        eqns = [*self.partition.duplicated, *self.partition.global_]
        return GlobalPart(eqns, parts, replicated)

    def constrained(
        self, results: Sequence[jax.Array | PerReplica]
    ) -> list[jax.Array | PerReplica]:
        """The results with their shardings."""
        return [
            each
            if isinstance(each, PerReplica) or sharding is None
            else lax.with_sharding_constraint(each, sharding)
            for each, sharding in zip(results, self.layout.shardings, strict=True)
        ]

    def _sharded_like(self, var: Var, array: jax.Array) -> jax.Array:
        """`array` with the sharding of an input."""
        layout = self.layout.inputs.get(var, REPLICATED)
        where = with_inner(self.layout.leaves[var].inner, self._replicas, layout)
        return lax.with_sharding_constraint(array, where)
