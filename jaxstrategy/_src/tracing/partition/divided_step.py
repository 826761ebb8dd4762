"""A step of which some arrays are divided over the replicas: `DividedStep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import Literal
from jax.ref import AbstractRef

from jaxstrategy._src.replicas.inner_axes import with_inner
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    LayoutOrDimension,
    ReplicaLayout,
)
from jaxstrategy._src.tracing.jaxprs.rewrite import rewritten
from jaxstrategy._src.tracing.jaxprs.visit import (
    ArrayType,
    Atom,
    Equation,
    Jaxpr,
    Var,
    closed,
    jaxpr_of,
)
from jaxstrategy._src.tracing.numbered_prints import (
    has_prints,
    with_merges,
    with_numbered_prints,
)
from jaxstrategy._src.tracing.on_replicas import on_replicas
from jaxstrategy._src.tracing.partition.global_part import GlobalPart
from jaxstrategy._src.tracing.partition.layout import (
    Layout,
    Layouts,
)
from jaxstrategy._src.tracing.partition.partition import (
    Partition,
    flattened,
    partition,
)
from jaxstrategy._src.tracing.partition.per_replica_part import PerReplicaPart
from jaxstrategy._src.tracing.partition.reduce_scatters import (
    ReduceScatters,
    reduce_scatters_of,
)
from jaxstrategy._src.tracing.partition.values import (
    PartCollectives,
    ReplicaValues,
    numbered_here,
    shard_function,
)
from jaxstrategy._src.tracing.replication.rules import analyse, varying
from jaxstrategy._src.tracing.replication.types import Collective, Site
from jaxstrategy._src.tracing.trace import Evaluate
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.tracing.value_form import with_values
from jaxstrategy._src.values.arrays import Function, Leaf
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.access import Cell


@final
class DividedStep:
    """A step as what each replica computes, and what is computed once for all."""

    def __init__(self, step: TracedStep, given: Sequence[Leaf]) -> None:
        trace = step.trace
        self._trace = trace
        self.replicas = self._replicas = trace.replicas
        self._has_prints = has_prints(trace.jaxpr, self._replicas)
        whole = with_merges(trace.jaxpr) if self._has_prints else trace.jaxpr
        flat = flattened(whole)
        self._constants, self._calls = flat.constants, flat.calls
        references = self._mirrored_references(flat.jaxpr)
        self._values = with_values(flat.jaxpr, references)
        jaxpr = self.jaxpr = self._values.jaxpr
        varies = [self._replicas.differ(layout) for layout in trace.layouts]
        self._differs = varies = varies + [False] * len(self._constants)
        unpacking = trace.unpacking
        self._varies = varying(jaxpr, varies, self._replicas, unpacking)
        self.partition: Partition = partition(jaxpr, self._varies, _is_kept)
        self.layout: Layout = Layouts(
            step, jaxpr.invars, self.partition, given
        ).chosen()
        self.reduce_scatters: ReduceScatters = reduce_scatters_of(
            jaxpr, self.partition, self.layout, self._replicas
        )
        inside_parts = {
            var: dimension
            for var, dimension in self.layout.inputs.items()
            if var in self.partition.read_per_replica
        }
        self.per_replica_part = PerReplicaPart(
            self.partition.per_replica,
            inside_parts,
            {var: self.layout.leaves[var].inner for var in inside_parts},
            self.reduce_scatters,
            [*self._crossing, *self._varying_results],
            self._replicas,
            self._varies,
        )

    def _mirrored_references(self, flat: Jaxpr) -> list[int]:
        return [
            index
            for index, layout in enumerate(self._trace.layouts)
            if isinstance(flat.invars[index].aval, AbstractRef) and layout is REPLICATED
        ]

    @cached_property
    def _results(self) -> Sequence[Atom]:
        """The step's own results; behind them stand what variables hold afterwards."""
        return self.jaxpr.outvars[: len(self._trace.varies)]

    @cached_property
    def _varying_results(self) -> list[Atom]:
        pairs = zip(self._results, self._trace.varies, strict=True)
        return [atom for atom, varies in pairs if varies]

    @cached_property
    def _common_results(self) -> list[Atom]:
        """What is equal on all replicas, of results and variables."""
        pairs = zip(self._results, self._trace.varies, strict=True)
        own = [atom for atom, varies in pairs if not varies]
        return [*own, *self.jaxpr.outvars[len(self._trace.varies) :]]

    @cached_property
    def _crossing(self) -> list[Var]:
        """What the replicas make, and is used or returned outside."""
        wanted = self._wanted_globally
        made = self.partition.made_per_replica - self.partition.made_globally
        variables = (var for eqn in self.partition.per_replica for var in eqn.outvars)
        return [var for var in variables if var in made and var in wanted]

    @cached_property
    def _wanted_globally(self) -> frozenset[Var]:
        results = (a for a in self._common_results if not isinstance(a, Literal))
        return self.partition.read_globally.union(results)

    # For explanations.

    @cached_property
    def collectives(self) -> Sequence[Collective]:
        """The collectives of the step itself, by the equations of `jaxpr`."""
        replicas = self._replicas
        findings = analyse(
            self.jaxpr,
            self._differs,
            replicas.collective_axes,
            replicas.count,
            unpacking=self._trace.unpacking,
            mesh=replicas.mesh,
        )
        return [found for found in findings.collectives if not found.is_merge]

    def site(self, eqns: tuple[Equation, ...]) -> Site:
        """Where an equation stands in the user's step."""
        calls = (self._calls[var] for var in eqns[-1].outvars if var in self._calls)
        return Site((*eqns, *next(calls, ())))

    @property
    def kept(self) -> list[tuple[Atom, int | None, int | None]]:
        """What is equal on all replicas, of results and variables.

        For each the dimension along which it lies, and that along which it is divided
        before it is made whole.
        """
        first = self._divided_first
        return list(zip(self._common_results, self._lies, first, strict=True))

    @property
    def _lies(self) -> list[int | None]:
        """The dimension along which what is equal on all replicas is divided."""
        pairs = zip(self._trace.varies, self.layout.outputs, strict=True)
        dimensions = [dimension for varies, dimension in pairs if not varies]
        variables = (self.jaxpr.invars[index] for index in self._values.replaced)
        return [*dimensions, *map(self.layout.inputs.get, variables)]

    @property
    def variables(self) -> list[Var]:
        """The variables that are values: the last of `kept` is what they then hold."""
        return [self.jaxpr.invars[index] for index in self._values.replaced]

    @property
    def arguments(self) -> Mapping[int, int | None]:
        """The dimension along which arguments are to be divided; None: whole."""
        return self.layout.arguments

    # Evaluation.

    def evaluate(
        self,
        leaves: Sequence[Leaf],
        references: dict[Cell, jax.Ref],
        within: Callable[[Evaluate], Evaluate],
    ) -> tuple[list[jax.Array | PerReplica], list[jax.Array]]:
        """As `Trace.evaluate`, with arrays divided as the layout says."""
        given = self._trace.operands(leaves, references)
        given += self._constants
        contents = {i: given[i] for i in self._values.replaced if given[i] is not None}
        for index, reference in contents.items():
            given[index] = reference[...]
        known: dict[Var, Leaf] = dict(zip(self.jaxpr.invars, given, strict=True))
        varying_results, crossing, more = self._on_replicas(known, within)
        known.update(zip(self._crossing, crossing, strict=True))
        common = self._made_divided(self._computed_once(known))
        own = len(self._common_results) - len(self._values.replaced)
        for index, value in zip(self._values.replaced, common[own:], strict=True):
            if index in contents:
                contents[index][...] = self._placed_as(value, self.jaxpr.invars[index])
        return self._joined(varying_results, common[:own]), more

    def _on_replicas(
        self, known: dict[Var, Leaf], within: Callable[[Evaluate], Evaluate]
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """The varying results, what crosses, and further outputs of stages."""
        taken = [var for var in self._taken if known[var] is not None]
        evaluate = within(lambda inputs: (self._of_replica(taken, inputs), []))
        count = len(self._varying_results)

        def replica(*locals_: Leaf) -> tuple[list[jax.Array], list[jax.Array], list]:
            returned, more = evaluate(locals_)
            own = [lax.expand_dims(array, (0,)) for array in returned[:count]]
            # Of a program that returns nothing XLA runs callbacks on one device only.
            return own, returned[count:], more or [jnp.zeros((), jnp.int8)]

        replicas = self._replicas
        dimensions = self.per_replica_part.dimensions
        returned = (
            [STACKED] * count,
            [dimensions.get(var, REPLICATED) for var in self._crossing],
            REPLICATED,
        )
        function = numbered_here(replica) if replicas.inner_axes else replica
        if self._has_prints:
            function = with_numbered_prints(function, replicas)
        layouts = list(map(self._of_input, taken))
        run = on_replicas(function, replicas, layouts, returned)
        own, crossing, more = run(*(known[var] for var in taken))
        return own, crossing, more

    @cached_property
    def _taken(self) -> list[Var]:
        """The inputs that the replicas' part reads or returns."""
        read = {
            *self.partition.read_per_replica,
            *(a for a in self._varying_results if not isinstance(a, Literal)),
        }
        return [var for var in self.jaxpr.invars if var in read]

    @cached_property
    def _layouts(self) -> dict[Var, ReplicaLayout]:
        return dict(zip(self.jaxpr.invars, self._trace.layouts, strict=False))

    def _of_input(self, var: Var) -> LayoutOrDimension:
        return self.layout.inputs.get(var, self._layouts.get(var, REPLICATED))

    def _of_replica(
        self, taken: Sequence[Var], inputs: Sequence[Leaf]
    ) -> list[jax.Array]:
        """Of one replica's inputs its varying results, and what crosses."""
        given = dict(zip(taken, inputs, strict=True))
        divided = self.layout.inputs
        values = ReplicaValues(
            {var: value for var, value in given.items() if var not in divided},
            {var: value for var, value in given.items() if var in divided},
            self.per_replica_part.dimensions,
            PartCollectives(self._replicas, self.per_replica_part.inner),
        )
        self.per_replica_part.evaluate(values)
        parts = self.per_replica_part.dimensions
        crossing = self._crossing
        return [
            *map(values.whole, self._varying_results),
            *(values.parts[v] if v in parts else values.whole(v) for v in crossing),
        ]

    def _computed_once(self, known: dict[Var, Leaf]) -> list[jax.Array]:
        """What is equal on all replicas, computed once for all."""
        eqns = [*self.partition.copied, *self.partition.global_]
        taken = self._wanted_globally - self.partition.made_globally
        free = [var for var in known if var in taken]
        jaxpr = jaxpr_of(free, eqns, self._common_results)
        if self._replicas.inner_axes:
            jaxpr = rewritten(jaxpr, self._constraint)
        return core.jaxpr_as_fun(closed(jaxpr))(*(known[var] for var in free))

    def _constraint(self, eqn: Equation) -> Function | None:
        """A constraint along inner axes as one of arrays on all replicas."""
        if eqn.primitive.name != "sharding_constraint":
            return None
        where = self._replicas.on_mesh(eqn.params["sharding"])
        return lambda array: [lax.with_sharding_constraint(array, where)]

    def _made_divided(self, common: Sequence[jax.Array]) -> list[jax.Array]:
        """The same, of which those are divided at first that were made of parts.

        Or XLA makes the last sum for them whole, on each device, from parts that it has
        gathered, and rounds otherwise (JAX 0.10 and 0.12).
        """
        divided = self._replicas.constraint_along
        return [
            array
            if dimension is None
            else lax.with_sharding_constraint(array, divided(dimension, array.ndim))
            for array, dimension in zip(common, self._divided_first, strict=True)
        ]

    @cached_property
    def _divided_first(self) -> list[int | None]:
        """The dimension along which whole results are divided before."""
        return [
            None if dimension is None or self.global_part.is_whole(atom) else dimension
            for atom, dimension in self._could_be_divided
        ]

    @cached_property
    def _could_be_divided(self) -> list[tuple[Atom, int | None]]:
        """What is equal on all replicas, and the dimension that whole ones could be."""
        divisible = zip(self._trace.varies, self.layout.divisible, strict=True)
        own = [dimension for varies, dimension in divisible if not varies]
        own += map(self._divisible, self._values.replaced)
        return list(zip(self._common_results, own, strict=True))

    def _divisible(self, index: int) -> int | None:
        """The dimension along which a variable could be divided that is whole."""
        var = self.jaxpr.invars[index]
        if var in self.layout.inputs:
            return None
        kind: ArrayType = var.aval
        return self._replicas.usual_division(kind).dimension

    @cached_property
    def global_part(self) -> GlobalPart:
        """What is computed once for all, as far as it lies divided."""
        dimensions = {**self.layout.inputs, **self.per_replica_part.dimensions}
        wanted = self._wanted_globally
        parts = {var: d for var, d in dimensions.items() if var in wanted}
        could_be = self._could_be_divided
        pairs = zip(could_be, self._lies, strict=True)
        small = {
            atom
            for (atom, could), dimension in pairs
            if could is None and dimension is None and not isinstance(atom, Literal)
        }
        return GlobalPart(
            [*self.partition.copied, *self.partition.global_], parts, small
        )

    def _joined(
        self, varying_results: Sequence[jax.Array], common: Sequence[jax.Array]
    ) -> list[jax.Array | PerReplica]:
        """The step's results, in their order and where they belong."""
        own, others = iter(varying_results), iter(common)
        return self.placed(
            [
                PerReplica(next(own)) if varies else next(others)
                for varies in self._trace.varies
            ]
        )

    def placed(
        self, results: Sequence[jax.Array | PerReplica]
    ) -> list[jax.Array | PerReplica]:
        """The results where they belong: divided, or whole."""
        return [
            each
            if isinstance(each, PerReplica) or place is None
            else lax.with_sharding_constraint(each, place)
            for each, place in zip(results, self.layout.placements, strict=True)
        ]

    def _placed_as(self, array: jax.Array, var: Var) -> jax.Array:
        """An array as the one lies whose place it takes."""
        layout = self.layout.inputs.get(var, REPLICATED)
        where = with_inner(self.layout.leaves[var].inner, self._replicas, layout)
        return lax.with_sharding_constraint(array, where)


def _is_kept(eqn: Equation) -> bool:
    return shard_function(eqn) is not None
