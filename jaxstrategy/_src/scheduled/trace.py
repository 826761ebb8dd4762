"""A scheduled function as it was traced: `FunctionTrace`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy._src import masks
from jaxstrategy._src.contexts import context, replica_context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.masks import BatchArray, StepMasks
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.parameter_servers.protocol import Input
from jaxstrategy._src.replicas.mesh import as_numbers, is_key
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing import nnx, step_arguments
from jaxstrategy._src.tracing.checks import step_checks
from jaxstrategy._src.tracing.jaxprs import Equation
from jaxstrategy._src.tracing.signature import Role, Signature, is_one_leaf
from jaxstrategy._src.tracing.traced_step import (
    ReplicaStep,
    StepEnvironment,
    TracedStep,
)
from jaxstrategy._src.values import arrays, per_replica
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.remote_kinds import (
    PendingChange,
    named,
    per_worker_kind_of,
    server_kind_of,
)
from jaxstrategy._src.variables.variable import Variable

PREFIX = "jaxstrategy_worker_input_"
"""An equation of this name and a number stands for what the worker has."""


@final
class Recorder:
    """The inputs that a trace asks for besides the arguments."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        # A variable that all stand-ins are made of, so that they are values that are
        # unknown while the function is traced.
        scalar = jax.ShapeDtypeStruct((), np.int32)
        self.token = PendingChange("what the worker has", scalar, replicas)
        self.inputs: list[Input] = []  # by the number in the name of the equation
        self.split: list[bool] = []  # which have one version for each replica
        # The methods by which variables were changed, by their `added`.
        self.changes: dict[Handle, set[str]] = {}
        self.turns: dict[int, int] = {}  # how many elements of each iterator are taken
        self._batches: list[BatchArray] = []
        self._elements: dict[tuple[int, int], int] = {}
        self.masks = StepMasks(self._batches)  # of the batches that are filled up
        self.had_masks = False
        self.index: jax.Array | None = None  # of the worker that runs the function

    def begin(self) -> None:
        """Forget what an earlier trace has asked for."""
        for kept in (self.inputs, self.split, self.changes, self.turns):
            kept.clear()

    def end(self) -> None:
        """Drop what only the trace may use, as it ends."""
        self.had_masks = self.masks.any
        self._batches.clear()
        self.index = None

    def note(self, variable: Handle, method: str) -> None:
        """Takes note of a change of a variable."""
        self.changes.setdefault(variable, set()).add(method)

    def turn(self, iterator: int) -> int:
        """How many elements of an iterator were taken before; now it is one more."""
        turn = self.turns.get(iterator, 0)
        self.turns[iterator] = turn + 1
        return turn

    def input(
        self,
        given: Input,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        is_split: bool = False,
    ) -> jax.Array:
        """A stand-in for something that the worker has."""
        name = f"{PREFIX}{len(self.inputs)}"
        self.inputs.append(given)
        self.split.append(is_split)
        step = access.tracing()
        found = None if step is None else step.reference(self.token)
        assert found is not None, "the function is being traced"
        # What differs between replicas comes from their number, as far as proofs go.
        token = found[...] + self._replicas.index() if is_split else found[...]

        def stand_in(token: jax.Array) -> jax.Array:
            return jnp.zeros(shape, dtype) + token.astype(dtype)

        return named(name, stand_in)(token)

    def note_mask(
        self, array: jax.Array, mask: jax.Array, element: tuple[int, int]
    ) -> None:
        """Records the mask of an array's rows."""
        place = self._elements.setdefault(element, len(self._elements))
        self._batches.append(BatchArray(array, mask, place))

    def across(self, array: jax.Array) -> PyTree:
        """One replica's version as code sees all of them in cross-replica context."""
        if self._replicas.count == 1:
            return array
        return per_replica.from_local(array, self._replicas)


def current() -> Recorder | None:
    """The recorder of the function that is being traced; None outside of one."""
    return cast("Recorder | None", context.current().function)


Call: TypeAlias = Callable[[Function, Sequence[PyTree], dict[str, PyTree]], PyTree]


_OURS = "jaxstrategy_"


class FunctionTrace(NamedTuple):
    """A function as one replica of a worker computes it."""

    step: TracedStep
    recorder: Recorder
    keys: dict[int, Any]  # of arguments that are random keys: programs take numbers
    key_results: Sequence[Any]  # the same of each of the results, or None


def trace_function(
    fn: Function,
    strategy: AbstractStrategy,
    signature: Signature,
    leaves: Sequence[Leaf],
    as_step: Call | None = None,
) -> FunctionTrace:
    """Traces a function, as a step in cross-replica context."""
    recorder = Recorder(strategy._replicas)
    pending: list[Handle] = [recorder.token]
    key_results: list[Any] = []

    def call(fn: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        if as_step is not None:
            with (
                context.entered(function=recorder),
                nnx.unchanged((args, kwargs), step.name),
            ):
                return _without_keys(as_step(fn, args, kwargs), key_results)
        args, kwargs = _across(signature, strategy, args, kwargs)
        with context.entered(
            strategy=strategy, replica=None, in_step=True, function=recorder
        ):
            # Before inner functions can, whose values nobody else may use.
            recorder.index = recorder.input(Input("index"), (), np.int32)
            with nnx.unchanged((args, kwargs), step.name):
                returned = fn(*args, **kwargs)
            own = replica_context.to_replica(returned)
            return _without_keys(own, key_results)

    @contextlib.contextmanager
    def with_masks(own: Sequence[Leaf]) -> Iterator[None]:
        recorder.begin()
        for place, role in enumerate(step.roles):
            if role is Role.MASK:
                recorder.note_mask(own[place - 1], own[place], (-1, place))
        try:
            with masks.tracing_with(recorder.masks):
                yield
        finally:
            recorder.end()

    def variables() -> list[Variable]:
        there = access.usable_by(strategy)
        kinds = [kind for v in there if (kind := server_kind_of(v)) is not None]
        pending[1:] = [change for kind in kinds for change in kind.pending]
        return cast("list[Variable]", [*there, *pending])

    environment = StepEnvironment(strategy._replicas, call, variables)
    step = ReplicaStep(lambda: fn, environment, signature, lambda: False)
    trace = step.trace(leaves, with_masks)
    _check_variables(trace, set(pending), step.name, is_here=as_step is not None)
    if recorder.had_masks:
        step_arguments.check_traced(recorder.masks, step.name)
    step_checks.check(trace, RunOptions().expect_mirrored, set())
    kinds = ((n, leaf) for n, leaf in enumerate(leaves) if is_key(leaf.dtype))
    keys = {number: jax.random.key_impl(leaf) for number, leaf in kinds}
    return FunctionTrace(trace, recorder, keys, key_results)


def _without_keys(returned: PyTree, kinds: list[Any]) -> PyTree:
    """What a function returned, with numbers for random keys; `kinds` tells which."""

    def numbers(leaf: Leaf) -> Leaf:
        if not arrays.is_array(leaf):
            return leaf
        array = jnp.asarray(leaf)
        has_keys = is_key(array.dtype)
        kinds.append(jax.random.key_impl(array) if has_keys else None)
        return as_numbers(array)

    return jax.tree.map(numbers, returned, is_leaf=is_one_leaf)


def _across(
    signature: Signature,
    strategy: AbstractStrategy,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
) -> tuple[Sequence[PyTree], dict[str, PyTree]]:
    """The arguments as code sees them in cross-replica context."""
    if strategy._replicas.count == 1:
        return args, kwargs
    roles = jax.tree.unflatten(
        signature.treedef, [signature.roles[i] for i in signature.leaves]
    )

    def wrap(role: Role, leaf: Leaf) -> Leaf:
        if role is not Role.PER_REPLICA:
            return leaf
        return per_replica.from_local(jnp.asarray(leaf), strategy._replicas)

    return jax.tree.map(wrap, roles, (tuple(args), kwargs))


def _check_variables(
    trace: TracedStep, pending: set[Handle], name: str, is_here: bool
) -> None:
    for variable in trace.used:
        is_workers = per_worker_kind_of(variable) is not None
        if is_here and is_workers:
            raise ContextError(
                f"`{name}` runs in this process, as it is no part of a scheduled "
                f"function, and uses variable {variable.name!r}, of which only workers "
                "have copies (`per_worker_variable=True`). Schedule it with a "
                "`ClusterCoordinator`; `read_all()` reads the copies."
            )
        if variable in pending or is_workers or server_kind_of(variable) is not None:
            continue
        raise ContextError(
            f"`{name}` was scheduled, and uses variable {variable.name!r}, which was "
            "not made in the scope of its ParameterServerStrategy: it is in the memory "
            "of the coordinator, which no worker reaches. Make it in "
            "`strategy.scope()`, or pass `variable.value()` as an argument."
        )


def name_in_trace(eqn: Equation) -> str:
    """The name of the function that an equation calls, if it calls one of ours."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return ""
    name = cast("Any", eqn.params.get("name"))
    return name if isinstance(name, str) and name.startswith(_OURS) else ""


def is_ours(eqn: Equation) -> bool:
    """Whether an equation stands for something that a worker or a server does."""
    return name_in_trace(eqn).startswith(("jaxstrategy_server_", "jaxstrategy_worker_"))
