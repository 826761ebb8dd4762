"""A step before and after it is traced: `ReplicaStep` and `TracedStep`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding

from jaxstrategy._src.reductions.packing import Overlap
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    ReplicaLayout,
    Replicas,
)
from jaxstrategy._src.text import Line
from jaxstrategy._src.tracing import nnx, rebinding, signature as _signature
from jaxstrategy._src.tracing.constants import ProgramValue
from jaxstrategy._src.tracing.jaxprs import (
    ArrayType,
    ClosedJaxpr,
    Jaxpr,
    KeyPath,
    closed,
    variables,
)
from jaxstrategy._src.tracing.numbered_prints import with_numbers
from jaxstrategy._src.tracing.replication.rules import analyse
from jaxstrategy._src.tracing.replication.types import Findings, Replication
from jaxstrategy._src.tracing.signature import NamedResults, Results, Role, Signature
from jaxstrategy._src.tracing.trace import (
    CapturedReference,
    OneReplica,
    StepInput,
    check_conditions,
    check_not_in_shard_map,
    one_replica,
    pack_reductions,
    shards_state,
)
from jaxstrategy._src.tracing.translation import UnknownAxis, translated
from jaxstrategy._src.tracing.vmapped.replicas import on_replicas
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.access import Cell, StepVariables
from jaxstrategy._src.variables.variable import Variable

# A `with` block for the user's code, given one replica's arguments.
Tracing = Callable[[Sequence[Leaf]], contextlib.AbstractContextManager[None]]


@final
@dataclasses.dataclass(frozen=True)
class StepEnvironment:
    """What all steps of a strategy have in common."""

    replicas: Replicas
    call: Callable[[Function, Sequence[PyTree], dict[str, PyTree]], PyTree]
    variables: Callable[[], Sequence[Variable]]
    overlap: Overlap | None = None


@final
class ReplicaStep:
    """A step for one signature; shapes and dtypes are open."""

    def __init__(
        self,
        get_fn: Callable[[], Function | None],
        environment: StepEnvironment,
        signature: Signature,
        may_create: Callable[[], bool],
    ) -> None:
        self._get_fn = get_fn
        self._environment = environment
        self._may_create = may_create
        self.signature = signature
        self.replicas = environment.replicas
        self.overlap = environment.overlap
        self.roles = [role for role in signature.roles if role is not Role.STATIC]
        self.name = name_of(self.fn)
        # Once it is traced, whether arrays replace Flax NNX objects among arguments.
        self.has_objects = False
        # For each traced argument whether it has a version for each replica.
        self.layouts: list[ReplicaLayout] = [
            STACKED if role is Role.PER_REPLICA else REPLICATED for role in self.roles
        ]

    @property
    def is_alive(self) -> bool:
        return self._get_fn() is not None

    @property
    def fn(self) -> Function:
        fn = self._get_fn()
        assert fn is not None, "the caller of a program holds its function"
        return fn

    @cached_property
    def labels(self) -> list[str]:
        """The names of traced arguments in messages."""
        labels = self.signature.labels(self.fn)
        return [labels[index] for index in self.signature.dynamic]

    def label(self, index: int) -> str:
        return self.labels[index]

    def mirrored_values(self, leaves: Sequence[Leaf]) -> dict[int, ProgramValue]:
        """The leaves that are equal on all replicas, by index."""
        return {
            index: ProgramValue(leaves[index], self.labels[index])
            for index, role in enumerate(self.roles)
            if role is Role.SAME
        }

    def trace(self, leaves: Sequence[Leaf], tracing: Tracing) -> TracedStep:
        """Traces the function for arguments of these types."""
        check_not_in_shard_map(self.name)
        run = functools.partial(self._run, tracing)
        try:
            try:
                return self._traced(run, leaves, self._may_create())
            except _CreatedVariables:  # which are inputs the second time
                return self._traced(run, leaves, may_create=False)
        except rebinding.Leak as leak:
            # Only after the trace JAX says which line made the tracer.
            raise leak.as_error() from None

    def _traced(
        self,
        run: Callable[[Sequence[Leaf]], tuple[list[jax.Array], Results]],
        leaves: Sequence[Leaf],
        may_create: bool,
    ) -> TracedStep:
        live = list(self._environment.variables())
        results: list[Results] = []
        traced: list[StepVariables] = []

        def replica(*locals_: Leaf) -> list[jax.Array]:
            own, references = locals_[: len(leaves)], locals_[len(leaves) :]
            step = StepVariables(list(zip(live, references, strict=True)), may_create)
            traced.append(step)
            try:
                with access.traced_with(step):
                    arrays, returned = run(own)
            except UnknownAxis as error:
                if step.created:
                    raise _CreatedVariables from error
                raise
            if step.created:
                # The trace cannot end: `shard_map` has no rule for their references.
                raise _CreatedVariables
            results.append(returned)
            return arrays

        inputs = [StepInput(x, argument=i) for i, x in enumerate(self.layouts)]
        inputs += [StepInput(_layout(v, self.replicas), variable=v) for v in live]
        try:
            traced_replica = one_replica(replica, leaves, inputs, self.replicas)
        except CapturedReference as error:
            raise TypeError(
                "The step uses a `jax.Ref` that was made outside of it, whose memory "
                "is on one device. Make a `js.Variable` in the strategy's scope, which "
                "has a copy on each; or pass `ref[...]`, and write what the step "
                "returns."
            ) from error
        used = cast("dict[int, Variable]", traced[-1].used)
        return TracedStep(self, traced_replica, results[-1], used)

    def _run(
        self, tracing: Tracing, locals_: Sequence[Leaf]
    ) -> tuple[list[jax.Array], Results]:
        leaves = [
            jax.lax.squeeze(leaf, (0,)) if role is Role.PER_REPLICA else leaf
            for leaf, role in zip(locals_, self.roles, strict=True)
        ]
        fn = self.fn
        args, kwargs = self.signature.rebuild(leaves)
        self.has_objects = nnx.has_arrays((args, kwargs))
        statics = self.signature.with_statics()
        labels = self.signature.labels(fn) if statics else ()
        named = [(labels[index].strip("`"), value) for index, value in statics]
        call = functools.partial(nnx.call, fn, self.name, named)
        try:
            with tracing(leaves):
                returned = self._environment.call(call, args, kwargs)
        except rebinding.Leak:
            raise
        except Exception as error:
            if (new := translated(error, self.name, self.replicas)) is None:
                raise
            raise new from error
        return _signature.flatten_results(returned, self.signature.statics, self.name)


def name_of(fn: Function) -> str:
    """The name of a step in messages and profiles."""
    return getattr(fn, "__name__", type(fn).__name__)


class _CreatedVariables(Exception):
    """A step has created variables: trace again, with them as inputs."""


def _layout(variable: Variable, replicas: Replicas) -> ReplicaLayout:
    has_copies = variable.lives_on(replicas) and not variable.copies_must_agree
    return STACKED if has_copies else REPLICATED


# One replica's inputs -> its results, and what was found about them.
Evaluate = Callable[[Sequence[Leaf]], tuple[list[jax.Array], list[jax.Array]]]


@final
class TracedStep(NamedResults):
    """A step as one replica sees it, traced for some types of arguments."""

    def __init__(
        self,
        step: ReplicaStep,
        traced: OneReplica,
        results: Results,
        used: dict[int, Variable],
    ) -> None:
        super().__init__(step.name, results, step.has_objects)
        self.replica_step = step
        self.signature: Signature = step.signature
        self.replicas = replicas = step.replicas
        self.donated = frozenset[int]()
        self.closed: ClosedJaxpr = traced.closed
        # The computation of one replica, with the types of its inputs and outputs.
        self.jaxpr: Jaxpr = traced.jaxpr
        if step.overlap is not None and step.overlap.packing is not None:
            packing, sizes = step.overlap.packing, replicas.axis_sizes
            self.jaxpr = pack_reductions(traced.jaxpr, packing, sizes)
        if used:
            check_conditions(self.jaxpr)
        self.inputs = traced.inputs
        self.types: Sequence[ArrayType] = [var.aval for var in self.jaxpr.invars]
        self.outputs: Sequence[ArrayType] = [x.aval for x in self.jaxpr.outvars]
        self.used = list(used.values())
        self.used_inputs: dict[int, Variable] = {
            number: each.variable
            for number, each in enumerate(self.inputs)
            if each.variable is not None and id(each.variable) in used
        }
        # Leading equations that take a replica's part of arguments.
        self.unpacking = sum(layout is STACKED for layout in step.layouts)
        # For each input whether replicas have versions of their own.
        self.differs = [replicas.differ(each.layout) for each in self.inputs]
        self.findings: Findings = analyse(
            self.jaxpr,
            self.differs,
            replicas.axes,
            replicas.count,
            unpacking=self.unpacking,
            mesh=replicas.mesh,
        )
        # For each array that the step returns whether replicas may differ.
        self.varies: list[bool] = [
            state is not None and state.varies for state in self.findings.outputs
        ]
        self.is_partitioned = not traced.has_mesh and (
            shards_state(replicas)
            or (replicas.parts > 1 and any(not v.division.is_whole for v in self.used))
        )
        # A `PartitionedStep` if state is sharded, of a module that imports this one.
        self.partitioned: Any = None
        self.output_shardings: Mapping[int, NamedSharding] = {}

    def evaluate(
        self,
        leaves: Sequence[Leaf],
        references: dict[Cell, jax.Ref],
        checked: Evaluate | None = None,
    ) -> tuple[list[jax.Array | PerReplica], list[jax.Array]]:
        """The step's results on all replicas, and what `checked` finds."""
        if self.partitioned is not None and checked is None:
            return self.partitioned.evaluate(leaves, references), []
        operands = self.operands(leaves, references)
        used = [i for i, each in enumerate(operands) if each is not None]
        varies = self.varies

        def replica(*locals_: Leaf) -> tuple[list[jax.Array], list[jax.Array]]:
            by_number = dict(zip(used, locals_, strict=True))
            inputs = [by_number.get(i) for i in range(len(operands))]
            if checked is None:
                jaxpr = closed(with_numbers(self.jaxpr, self.replicas))
                returned, outputs = core.jaxpr_as_fun(jaxpr)(*inputs), []
            else:
                returned, outputs = checked(inputs)
            arrays = [
                jax.lax.expand_dims(array, (0,)) if differs else array
                for array, differs in zip(returned, varies, strict=True)
            ]
            if not arrays and not outputs:
                outputs = [jnp.zeros((), jnp.int8)]
            return arrays, outputs

        returned = [STACKED if differs else REPLICATED for differs in varies]
        layouts = [self.inputs[i].layout for i in used]
        run = on_replicas(replica, self.replicas, layouts, (returned, REPLICATED))
        arrays, outputs = run(*(operands[i] for i in used))
        results = [
            PerReplica(array) if differs else array
            for array, differs in zip(arrays, varies, strict=True)
        ]
        if self.partitioned is not None:
            return self.partitioned.constrained(results), outputs
        for number, sharding in self.output_shardings.items():
            results[number] = lax.with_sharding_constraint(results[number], sharding)
        return results, outputs

    def operands(
        self, leaves: Sequence[Leaf], references: dict[Cell, jax.Ref]
    ) -> list[Leaf]:
        """The inputs of `jaxpr`; None for variables that it does not use."""
        values = [
            each.constant if each.argument is None else leaves[each.argument]
            for each in self.inputs
        ]
        for number, variable in self.used_inputs.items():
            cell = variable.cell
            values[number] = references[cell] if cell in references else cell.ref
        return values

    @property
    def live_jaxpr(self) -> Jaxpr:
        """`jaxpr` without the variables that it does not use: others come and go."""
        read = (atom for eqn in self.jaxpr.eqns for atom in eqn.invars)
        used = set(variables([*read, *self.jaxpr.outvars]))
        pairs = zip(self.jaxpr.invars, self.inputs, strict=True)
        invars = [v for v, x in pairs if x.argument is not None or v in used]
        return self.jaxpr.replace(invars=invars)

    @cached_property
    def input_of(self) -> dict[int, int]:
        """For each argument which input of `jaxpr` it is."""
        inputs = enumerate(self.inputs)
        return {x.argument: i for i, x in inputs if x.argument is not None}

    @property
    def variables(self) -> Sequence[tuple[str, bool, Replication | None]]:
        """Each used variable: name, whether copies must agree, type after the step."""
        contents = self.findings.contents
        return [
            (variable.name, variable.copies_must_agree, contents.get(number))
            for number, variable in self.used_inputs.items()
        ]

    @cached_property
    def same_arguments(self) -> list[int]:
        """The indices of arguments that are equal on all replicas."""
        roles = enumerate(self.replica_step.roles)
        return [index for index, role in roles if role is Role.SAME]

    @cached_property
    def _key_paths(self) -> dict[int, KeyPath]:
        """The path of each traced argument."""
        leaves = self.signature.leaves
        numbered = jax.tree.unflatten(self.signature.treedef, leaves)
        paths = {index: path for path, index in jax.tree.leaves_with_path(numbered)}
        dynamic = enumerate(self.signature.dynamic)
        return {i: paths[index] for i, index in dynamic if index in paths}

    def key_path_of(self, argument: int) -> KeyPath:
        """The keys of an argument in `args` or `kwargs`."""
        return self._key_paths[argument][1:]

    def path_of(self, argument: int) -> str:
        """The keys of a leaf in its argument, as text: `".params['w']"`."""
        return jax.tree_util.keystr(self._key_paths[argument][2:])

    def label(self, argument: int) -> str:
        return self.replica_step.label(argument)

    def is_per_replica(self, argument: int) -> bool:
        return self.replica_step.roles[argument] is Role.PER_REPLICA

    def type_of(self, argument: int) -> ArrayType:
        """The type of an argument as the step sees it."""
        aval = self.types[self.input_of[argument]]
        return aval.update(shape=aval.shape[self.is_per_replica(argument) :])

    def line_of(self, state: Replication) -> Line | None:
        """The user's line where a value got its replication type."""
        return None if state.site is None else state.site.line

    @property
    def sources(self) -> list[str | None]:
        """The names of the inputs in messages; None for captured arrays."""
        names = [self._name(each) or "" for each in self.inputs]
        captured = "argument `captured "
        return [None if x.startswith(captured) else x or None for x in names]

    def origin_of(self, state: Replication) -> str:
        """Where a value began to vary, in words."""
        line = self.line_of(state)
        if state.input is None:
            return str(line or "a line that JAX did not keep")
        origin = self.inputs[state.input]
        is_argument = origin.argument is not None
        kind = "a PerReplica" if is_argument else "which has a copy per replica"
        source = f"{self._name(origin)}, {kind}"
        return source if line is None else f"{line}\n    (from {source})"

    def _name(self, each: StepInput) -> str | None:
        """The name of an input in messages; None for a constant."""
        if each.argument is not None:
            return f"argument {self.label(each.argument)}"
        return None if each.variable is None else f"variable {each.variable.name!r}"
