"""A step with state that is sharded over the replicas: `PartitionedStep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import final

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
    Atom,
    Equation,
    Var,
    closed,
    jaxpr_of,
    rewritten,
    variables,
    with_values,
)
from jaxstrategy._src.tracing.numbered_prints import (
    has_prints,
    with_merges,
    with_numbered_prints,
)
from jaxstrategy._src.tracing.partition.global_part import (
    GlobalPart,
    ReduceScatters,
    reduce_scatters_of,
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
    retrace_axis_indices,
)
from jaxstrategy._src.tracing.replication.rules import evaluated
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.tracing.vmapped.replicas import on_replicas
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.access import Cell


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
