"""A step of a strategy: as each replica takes it, and what is known once it is traced.

`ReplicaStep` becomes a `TracedStep` for arguments of certain types.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Protocol, final

import jax
from jax.sharding import NamedSharding

from jaxstrategy._src.reductions.packing import Overlap
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    ReplicaLayout,
    Replicas,
)
from jaxstrategy._src.text.user_code import Line
from jaxstrategy._src.tracing import results
from jaxstrategy._src.tracing.constants import ProgramValue
from jaxstrategy._src.tracing.functions import rebinding
from jaxstrategy._src.tracing.jaxprs.visit import (
    ArrayType,
    Jaxpr,
    KeyPath,
    variables,
)
from jaxstrategy._src.tracing.nnx.object_calls import takes_arrays
from jaxstrategy._src.tracing.replication.types import Findings, Replication
from jaxstrategy._src.tracing.results import Results
from jaxstrategy._src.tracing.roles import Role, Signature
from jaxstrategy._src.tracing.trace import Evaluate, Trace, check_not_divided, trace
from jaxstrategy._src.tracing.translation import translated
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.access import Cell
from jaxstrategy._src.variables.variable import Variable

# A `with` block for the step's own code, of the arguments of one replica.
Tracing = Callable[[Sequence[Leaf]], contextlib.AbstractContextManager[None]]


@final
@dataclasses.dataclass(frozen=True)
class StepEnvironment:
    """The surroundings of all steps of a strategy."""

    replicas: Replicas
    call: Callable[[Function, Sequence[PyTree], dict[str, PyTree]], PyTree]
    variables: Callable[[], Sequence[Variable]]
    overlap: Overlap | None = None


@final
class ReplicaStep:
    """A step for one structure of arguments; their shapes and dtypes are open."""

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
        """Whether there still is a function to trace."""
        return self._get_fn() is not None

    @property
    def fn(self) -> Function:
        """The function."""
        fn = self._get_fn()
        assert fn is not None, "the caller of a program holds its function"
        return fn

    @property
    def name(self) -> str:
        """Its name in messages and profiles."""
        return name_of(self.fn)

    @property
    def takes_arrays(self) -> bool:
        """Whether arrays stand for the objects that the user's function was given."""
        return takes_arrays(self.fn)

    def label(self, index: int) -> str:
        """The name of an argument in messages, by its place among the traced ones."""
        return self.signature.label(self.fn, self.signature.dynamic[index])

    @property
    def layouts(self) -> list[ReplicaLayout]:
        """The meaning of each argument that is traced."""
        return [
            STACKED if role is Role.PER_REPLICA else REPLICATED for role in self.roles
        ]

    def same(self, leaves: Sequence[Leaf]) -> dict[int, ProgramValue]:
        """The leaves that are no replica's own, by their place."""
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

    def trace(self, leaves: Sequence[Leaf], tracing: Sequence[Tracing]) -> Trace:
        """Traces the function once, for arguments of these types."""
        check_not_divided(self.name)
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
            # Where the value was made JAX says only when the trace has ended.
            raise leak.explained() from None

    def _run(
        self, tracing: Sequence[Tracing], locals_: Sequence[Leaf]
    ) -> tuple[list[jax.Array], Results]:
        own = [
            jax.lax.squeeze(leaf, (0,)) if role is Role.PER_REPLICA else leaf
            for leaf, role in zip(locals_, self.roles, strict=True)
        ]
        fn = self.fn
        args, kwargs = self.signature.rebuild(own)
        try:
            with contextlib.ExitStack() as blocks:
                for block in (*tracing, self._without_leaks):
                    blocks.enter_context(block(own))
                returned = self._environment.call(fn, args, kwargs)
        except rebinding.Leak:
            raise
        except Exception as error:
            if (told := translated(error, self.name, self.replicas)) is None:
                raise
            raise told from error
        return results.take_apart(returned, self.signature.statics, self.name)

    def _without_leaks(
        self, own: Sequence[Leaf]
    ) -> contextlib.AbstractContextManager[None]:
        if self.takes_arrays:  # it looks for leaks itself, where its objects are
            return contextlib.nullcontext()
        statics = [
            (self.signature.label(self.fn, index).strip("`"), value)
            for index, value in self.signature.with_statics()
        ]
        return rebinding.refused(self.fn, self.name, statics)


def name_of(fn: Function) -> str:
    """The name of a step in messages and profiles."""
    return getattr(fn, "__name__", type(fn).__name__)


class AbstractDivision(Protocol):
    """The division of a step between its replicas and what is computed once."""

    def evaluate(
        self,
        leaves: Sequence[Leaf],
        references: dict[Cell, jax.Ref],
        within: Callable[[Evaluate], Evaluate],
    ) -> tuple[list[jax.Array | PerReplica], list[jax.Array]]:
        """As `Trace.evaluate`."""
        ...

    def placed(
        self, results: Sequence[jax.Array | PerReplica]
    ) -> list[jax.Array | PerReplica]:
        """The results where they belong: divided, or whole."""
        ...

    @property
    def arguments(self) -> Mapping[int, int | None]:
        """The dimension along which arguments are to be divided; None: whole."""
        ...


@final
class TracedStep:
    """A step, as one replica sees it; what checks and explanations ask about it."""

    def __init__(
        self, step: ReplicaStep, trace: Trace, donated: frozenset[int] = frozenset()
    ) -> None:
        self.replica_step = step
        self.trace = trace
        self.donated = donated
        self.name = step.name
        self.signature: Signature = step.signature
        # The computation of one replica, and the types of its inputs and outputs.
        self.jaxpr: Jaxpr = trace.jaxpr
        self.types: Sequence[ArrayType] = [var.aval for var in self.jaxpr.invars]
        self.outputs: Sequence[ArrayType] = [x.aval for x in self.jaxpr.outvars]
        self.findings: Findings = trace.findings
        self.results: Results = trace.results
        # Whether it returns the new arrays of objects besides its own results.
        self.has_objects: bool = step.takes_arrays
        self.num_replicas: int = trace.replicas.count
        self.division: AbstractDivision | None = None
        self.placements: Mapping[int, NamedSharding] = {}

    def evaluate(
        self,
        leaves: Sequence[Leaf],
        references: dict[Cell, jax.Ref],
        within: Callable[[Evaluate], Evaluate],
        is_whole: bool = False,
    ) -> tuple[list[jax.Array | PerReplica], list[jax.Array]]:
        """The step's results on all replicas; see `Trace.evaluate`."""
        if self.division is None:
            arrays, more = self.trace.evaluate(leaves, references, within)
            return self._placed(arrays), more
        if not is_whole:
            return self.division.evaluate(leaves, references, within)
        arrays, more = self.trace.evaluate(leaves, references, within)
        return self.division.placed(arrays), more

    def _placed(
        self, arrays: list[jax.Array | PerReplica]
    ) -> list[jax.Array | PerReplica]:
        for number, sharding in self.placements.items():
            arrays[number] = jax.lax.with_sharding_constraint(arrays[number], sharding)
        return arrays

    @property
    def own_jaxpr(self) -> Jaxpr:
        """The same, of no variables but those that it uses: others come and go."""
        read = (atom for eqn in self.jaxpr.eqns for atom in eqn.invars)
        used = set(variables([*read, *self.jaxpr.outvars]))
        inputs = zip(self.jaxpr.invars, self.inputs, strict=True)
        invars = [var for var, place in inputs if place is not None or var in used]
        return self.jaxpr.replace(invars=invars)

    @cached_property
    def inputs(self) -> Sequence[int | None]:
        """For each input of `jaxpr` which argument it is."""
        count = len(self.signature.dynamic)
        return [i if i is not None and i < count else None for i in self.trace.inputs]

    @cached_property
    def held_by(self) -> Sequence[str | None]:
        """For each input of `jaxpr` the name of the variable it is; None for others."""
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
        """The variables that it uses."""
        return [
            (variable.name, variable.copies_must_agree, state)
            for variable, state in self.trace.contents
        ]

    @cached_property
    def same_arguments(self) -> list[int]:
        """The arguments that are equal on all replicas, by their place."""
        roles = enumerate(self.replica_step.roles)
        return [index for index, role in roles if role is Role.SAME]

    @cached_property
    def _key_paths(self) -> dict[int, KeyPath]:
        """The path of each argument that is traced, by its place among them."""
        leaves = self.signature.leaves
        numbered = jax.tree.unflatten(self.signature.treedef, range(len(leaves)))
        paths = {leaves[n]: path for path, n in jax.tree.leaves_with_path(numbered)}
        dynamic = enumerate(self.signature.dynamic)
        return {i: paths[at] for i, at in dynamic if at in paths}

    def key_path_of(self, argument: int) -> KeyPath:
        """The keys of an argument among `args`, or among `kwargs`."""
        return self._key_paths[argument][1:]

    def path_of(self, argument: int) -> str:
        """The keys of a leaf inside its argument, as text: `".params['w']"`."""
        return jax.tree_util.keystr(self._key_paths[argument][2:])

    def label(self, argument: int) -> str:
        """The name of an argument in messages, by its place among the traced ones."""
        return self.replica_step.label(argument)

    def is_per_replica(self, argument: int) -> bool:
        """Whether the argument was a `PerReplica`."""
        return self.replica_step.roles[argument] is Role.PER_REPLICA

    def type_of(self, argument: int) -> ArrayType:
        """The type of the argument as the step saw it."""
        aval = self._types_of_arguments[argument]
        return aval.update(shape=aval.shape[self.is_per_replica(argument) :])

    def path(self, keys: KeyPath) -> str:
        """The name of the result at `keys` in messages: `` `step(...)['loss']` ``."""
        if self.is_of_object(keys):  # which has the name of the array as one key
            return f"`{jax.tree_util.keystr(keys[2:]).removeprefix('.')}`"
        return f"`{self.name}(...){jax.tree_util.keystr(keys[self.has_objects :])}`"

    def is_of_object(self, keys: KeyPath) -> bool:
        """Whether the result at `keys` is a new array of an object."""
        return self.has_objects and bool(keys) and keys[0].idx == 1

    def began(self, state: Replication) -> Line | None:
        """The user's line where a value began to be what it is."""
        return None if state.site is None else state.site.line

    @property
    def sources(self) -> list[str | None]:
        """The names of the inputs in messages; None of captured arrays."""
        return [
            None if self._is_captured(index) else self.source(index)
            for index in range(len(self.inputs))
        ]

    def _is_captured(self, index: int) -> bool:
        """Whether an input is an array that the step captured, as a constant or not."""
        argument = self.inputs[index]
        if argument is None:
            return self.held_by[index] is None
        return self.label(argument).startswith("`captured ")

    def why(self, state: Replication) -> str:
        """Where a value began to vary, in words."""
        line = self.began(state)
        if state.input is None:
            return str(line or "a line that JAX did not keep")
        source = self.source(state.input)
        kind = "a PerReplica" if self.inputs[state.input] is not None else _COPIES
        source = f"{source}, {kind}"
        return source if line is None else f"{line}\n    (from {source})"

    def source(self, index: int) -> str:
        """The name of an input in messages: an argument or a variable."""
        argument = self.inputs[index]
        if argument is not None:
            return f"argument {self.label(argument)}"
        name = self.held_by[index]
        assert name is not None, "what a step captures is the same everywhere"
        return f"variable {name!r}"


_COPIES = "which has a copy per replica"
