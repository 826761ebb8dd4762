"""A step before and after it is traced: `ReplicaStep` and `TracedStep`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import jax
from jax.sharding import NamedSharding

from jaxstrategy._src.reductions.packing import Overlap
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    ReplicaLayout,
    Replicas,
)
from jaxstrategy._src.text import Line
from jaxstrategy._src.tracing import signature as _signature
from jaxstrategy._src.tracing.constants import ProgramValue
from jaxstrategy._src.tracing.functions import rebinding
from jaxstrategy._src.tracing.jaxprs import ArrayType, Jaxpr, KeyPath, variables
from jaxstrategy._src.tracing.nnx.object_calls import takes_arrays
from jaxstrategy._src.tracing.replication.types import Findings, Replication
from jaxstrategy._src.tracing.signature import NamedResults, Results, Role, Signature
from jaxstrategy._src.tracing.trace import (
    Evaluate,
    Trace,
    check_not_in_shard_map,
    trace,
)
from jaxstrategy._src.tracing.translation import translated
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.access import Cell
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

    @property
    def is_alive(self) -> bool:
        return self._get_fn() is not None

    @property
    def fn(self) -> Function:
        fn = self._get_fn()
        assert fn is not None, "the caller of a program holds its function"
        return fn

    @property
    def name(self) -> str:
        return name_of(self.fn)

    @property
    def takes_arrays(self) -> bool:
        """Whether arrays replace Flax NNX objects among the arguments."""
        return takes_arrays(self.fn)

    def label(self, index: int) -> str:
        """The name of a traced argument in messages."""
        return self.signature.label(self.fn, self.signature.dynamic[index])

    @property
    def layouts(self) -> list[ReplicaLayout]:
        """For each traced argument whether it has a version for each replica."""
        return [
            STACKED if role is Role.PER_REPLICA else REPLICATED for role in self.roles
        ]

    def mirrored_values(self, leaves: Sequence[Leaf]) -> dict[int, ProgramValue]:
        """The leaves that are equal on all replicas, by index."""
        return {
            index: ProgramValue(leaves[index], label)
            for index, label in self._labels.items()
        }

    @cached_property
    def _labels(self) -> dict[int, str]:
        return {
            index: self.label(index)
            for index, role in enumerate(self.roles)
            if role is Role.SAME
        }

    def trace(self, leaves: Sequence[Leaf], tracing: Tracing) -> Trace:
        """Traces the function for arguments of these types."""
        check_not_in_shard_map(self.name)
        try:
            return trace(
                functools.partial(self._run, tracing),
                leaves,
                self.layouts,
                self.replicas,
                self._environment.variables,
                self._may_create(),
                None if self.overlap is None else self.overlap.packing,
            )
        except rebinding.Leak as leak:
            # Only after the trace JAX says which line made the tracer.
            raise leak.as_error() from None

    def _run(
        self, tracing: Tracing, locals_: Sequence[Leaf]
    ) -> tuple[list[jax.Array], Results]:
        leaves = [
            jax.lax.squeeze(leaf, (0,)) if role is Role.PER_REPLICA else leaf
            for leaf, role in zip(locals_, self.roles, strict=True)
        ]
        fn = self.fn
        args, kwargs = self.signature.rebuild(leaves)
        checking: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not self.takes_arrays:  # it does so itself, where its objects are
            statics = [
                (self.signature.label(fn, index).strip("`"), value)
                for index, value in self.signature.with_statics()
            ]
            checking = rebinding.checking_leaks(fn, self.name, statics)
        try:
            with tracing(leaves), checking:
                returned = self._environment.call(fn, args, kwargs)
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


@final
class TracedStep(NamedResults):
    """The trace of a step as one replica sees it, for checks and explanations."""

    def __init__(
        self, step: ReplicaStep, trace: Trace, donated: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(step.name, trace.results, step.takes_arrays)
        self.replica_step = step
        self.trace = trace
        self.donated = donated
        self.signature: Signature = step.signature
        # The computation of one replica, with the types of its inputs and outputs.
        self.jaxpr: Jaxpr = trace.jaxpr
        self.types: Sequence[ArrayType] = [var.aval for var in self.jaxpr.invars]
        self.outputs: Sequence[ArrayType] = [x.aval for x in self.jaxpr.outvars]
        self.findings: Findings = trace.findings
        self.num_replicas: int = trace.replicas.count
        # A `PartitionedStep` if state is sharded, of a module that imports this one.
        self.partitioned: Any = None
        self.output_shardings: Mapping[int, NamedSharding] = {}

    def evaluate(
        self,
        leaves: Sequence[Leaf],
        references: dict[Cell, jax.Ref],
        instrument: Callable[[Evaluate], Evaluate],
        is_whole: bool = False,
    ) -> tuple[list[jax.Array | PerReplica], list[jax.Array]]:
        """The step's results on all replicas; see `Trace.evaluate`."""
        if self.partitioned is not None and not is_whole:
            return self.partitioned.evaluate(leaves, references, instrument)
        arrays, outputs = self.trace.evaluate(leaves, references, instrument)
        if self.partitioned is not None:
            return self.partitioned.constrained(arrays), outputs
        for number, sharding in self.output_shardings.items():
            arrays[number] = jax.lax.with_sharding_constraint(arrays[number], sharding)
        return arrays, outputs

    @property
    def live_jaxpr(self) -> Jaxpr:
        """`jaxpr` without the variables that it does not use: others come and go."""
        read = (atom for eqn in self.jaxpr.eqns for atom in eqn.invars)
        used = set(variables([*read, *self.jaxpr.outvars]))
        inputs = zip(self.jaxpr.invars, self.inputs, strict=True)
        invars = [var for var, index in inputs if index is not None or var in used]
        return self.jaxpr.replace(invars=invars)

    @cached_property
    def inputs(self) -> Sequence[int | None]:
        """For each input of `jaxpr` the index of its argument; None for others."""
        count = len(self.signature.dynamic)
        return [i if i is not None and i < count else None for i in self.trace.inputs]

    @cached_property
    def variable_names(self) -> Sequence[str | None]:
        """For each input of `jaxpr` the name of its variable; None for others."""
        variables, first = self.trace.variables, len(self.signature.dynamic)
        return [
            None if i is None or i < first else variables[i - first].name
            for i in self.trace.inputs
        ]

    @cached_property
    def _types_of_arguments(self) -> dict[int, ArrayType]:
        pairs = zip(self.inputs, self.types, strict=True)
        return {argument: aval for argument, aval in pairs if argument is not None}

    @property
    def variables(self) -> Sequence[tuple[str, bool, Replication | None]]:
        """Each used variable: name, whether copies must agree, type after the step."""
        return [
            (variable.name, variable.copies_must_agree, state)
            for variable, state in self.trace.contents
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
        aval = self._types_of_arguments[argument]
        return aval.update(shape=aval.shape[self.is_per_replica(argument) :])

    def line_of(self, state: Replication) -> Line | None:
        """The user's line where a value got its replication type."""
        return None if state.site is None else state.site.line

    @property
    def sources(self) -> list[str | None]:
        """The names of the inputs in messages; None for captured arrays."""
        sources: list[str | None] = []
        for index, argument in enumerate(self.inputs):
            if argument is None:
                is_captured = self.variable_names[index] is None
            else:
                is_captured = self.label(argument).startswith("`captured ")
            sources.append(None if is_captured else self.source(index))
        return sources

    def origin_of(self, state: Replication) -> str:
        """Where a value began to vary, in words."""
        line = self.line_of(state)
        if state.input is None:
            return str(line or "a line that JAX did not keep")
        is_argument = self.inputs[state.input] is not None
        kind = "a PerReplica" if is_argument else "which has a copy per replica"
        source = f"{self.source(state.input)}, {kind}"
        return source if line is None else f"{line}\n    (from {source})"

    def source(self, index: int) -> str:
        """The name of an input in messages."""
        argument = self.inputs[index]
        if argument is not None:
            return f"argument {self.label(argument)}"
        name = self.variable_names[index]
        assert name is not None, "what a step captures is the same everywhere"
        return f"variable {name!r}"
