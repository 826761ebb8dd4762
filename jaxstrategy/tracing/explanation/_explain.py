"""From a traced step to its explanation."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxstrategy._options import RunOptions
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.replicas._topology import Topology
from jaxstrategy.text._user_code import Line
from jaxstrategy.tracing import _roles
from jaxstrategy.tracing._jaxpr_types import ArrayType
from jaxstrategy.tracing._program import Program
from jaxstrategy.tracing._replica_step import ReplicaStep, StepEnvironment
from jaxstrategy.tracing._roles import Role
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.checks._step_checks import problems
from jaxstrategy.tracing.division._divided_step import DividedStep
from jaxstrategy.tracing.explanation import _compiled_costs
from jaxstrategy.tracing.explanation._between_devices import BetweenDevices
from jaxstrategy.tracing.explanation._compiled_collectives import compiled_collectives
from jaxstrategy.tracing.explanation._divided_collectives import collectives_of
from jaxstrategy.tracing.explanation._explained_collective import explained, nbytes_of
from jaxstrategy.tracing.explanation._explained_sharding import (
    kept_names,
    sharding_of,
    undivided,
)
from jaxstrategy.tracing.explanation._explanation import Explanation
from jaxstrategy.tracing.explanation._facts import (
    CompiledCollective,
    ExplainedCollective,
    ExplainedValue,
)
from jaxstrategy.tracing.explanation._sharding_facts import ExplainedSharding
from jaxstrategy.tracing.functions._code import place_of
from jaxstrategy.tracing.nnx import _adapter
from jaxstrategy.tracing.stages._stage import Stage
from jaxstrategy.tracing.stages._stages import stages_of
from jaxstrategy.values._types import Function, Leaf, PyTree


def explain(
    fn: Function,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    *,
    environment: StepEnvironment,
    options: RunOptions,
    topology: Topology,
    compiled: bool,
) -> Explanation:
    """A description of `fn(*args, **kwargs)` on the replicas of a strategy.

    Args:
      fn: the step.
      args: its positional arguments; `jax.ShapeDtypeStruct`s stand for arrays.
      kwargs: its keyword arguments.
      environment: what steps of the strategy run in.
      options: how `run` would compile it.
      topology: what times are predicted for.
      compiled: whether to compile it, for what XLA has to say.
    """
    fn, args, kwargs, options = _adapter.as_arrays(fn, args, kwargs, options)
    leaves, signature = _roles.take_apart(fn, args, kwargs, abstract=True)
    replica_step = ReplicaStep(lambda: fn, environment, signature, lambda: True)
    seen = _Collected()
    unchecked = dataclasses.replace(options, check_finite=False)
    program = Program(replica_step, [seen, *stages_of(replica_step, unchecked)])
    lowered = program.lower(leaves)
    (step,) = seen.steps
    executable = lowered.compile() if compiled else None
    donatable = list(_donatable(step))
    mirrored, per_replica = _results(step)
    collectives, sharding = _exchanged(step, leaves)
    return Explanation(
        name=step.name,
        num_replicas=environment.replicas.count,
        collectives=tuple(_with_lines(step, collectives)),
        mirrored=tuple(mirrored),
        per_replica=tuple(per_replica),
        static_arguments=dict(_static_arguments(fn, step)),
        variables=tuple(name for name, _, _ in step.variables),
        donated=tuple(_argument(step, index) for index in sorted(step.donated)),
        donatable=tuple(_argument(step, index) for index in donatable),
        donate_argnums=_whole_positions(step, {*step.donated, *donatable}),
        problems=tuple(problems(step, options.expect_mirrored)),
        topology=topology,
        memory=_compiled_costs.memory(executable),
        flops=_compiled_costs.flops(executable),
        sharding=sharding,
        replicas_per_device=environment.replicas.per_device,
        logical_axes=environment.replicas.inner_sizes,
        compiled_collectives=_compiled_collectives(executable, environment.replicas),
        has_loops=executable is not None and _compiled_costs.has_loops(executable),
    )


class _Collected(Stage):
    """Keeps what was traced.

    Attributes:
      steps: it, in order.
    """

    def __init__(self) -> None:
        self.steps: list[TracedStep] = []

    def traced(self, step: TracedStep) -> None:
        """Keeps a new trace."""
        self.steps.append(step)


def _with_lines(
    step: TracedStep, collectives: Iterable[ExplainedCollective]
) -> Iterator[ExplainedCollective]:
    """`collectives`, each with a line of the user's."""
    # None stands for what comes at the end of local steps: there the step is named.
    place = place_of(step.replica_step.fn)
    defined = None if place is None else Line(*place)
    for each in collectives:
        yield dataclasses.replace(each, line=each.line or defined)


def _exchanged(
    step: TracedStep, given: Sequence[Leaf]
) -> tuple[list[ExplainedCollective], ExplainedSharding | None]:
    """The collectives, and how state lies where it may be divided."""
    if isinstance(division := step.division, DividedStep):
        names = kept_names(step, division)
        collectives = list(collectives_of(division, names))
        return collectives, sharding_of(step, division, collectives)
    replicas = step.trace.replicas
    between = BetweenDevices(replicas) if replicas.per_device > 1 else None
    found = [
        explained(
            each.site,
            [atom.aval for atom in each.site.eqns[0].invars],
            between_devices=between and between.of(each.site.eqns[0]),
        )
        for each in step.findings.collectives
    ]
    has_places = replicas.state_sharding is not None or replicas.inner_axes
    return found, undivided(step, given) if has_places else None


def _value(path: str, aval: ArrayType, **more: Any) -> ExplainedValue:
    path = path.strip("`")
    return ExplainedValue(
        path, tuple(aval.shape), str(aval.dtype), nbytes_of([aval]), **more
    )


def _results(
    step: TracedStep,
) -> tuple[list[ExplainedValue], list[ExplainedValue]]:
    """The mirrored ones and the others."""
    mirrored, per_replica = [], []
    arrays = zip(
        step.results.array_paths(), step.outputs, step.findings.outputs, strict=True
    )
    for (_, keys), aval, state in arrays:
        path = step.path(keys).strip("`")
        if state is None or not state.varies:
            mirrored.append(_value(path, aval))
        else:
            line, why = step.began(state), step.why(state)
            per_replica.append(_value(path, aval, line=line, why=why))
    return mirrored, per_replica


def _argument(step: TracedStep, index: int) -> ExplainedValue:
    return _value(step.label(index), step.type_of(index))


def _static_arguments(fn: Function, step: TracedStep) -> Iterator[tuple[str, Any]]:
    signature = step.signature
    statics = iter(signature.statics)
    for index, role in enumerate(signature.roles):
        if role is Role.STATIC:
            yield signature.label(fn, index).strip("`"), next(statics)


# Donation: memory that a result of the same type could take over.


def _donatable(step: TracedStep) -> Iterator[int]:
    """Arguments that are not donated, with a result of the same type for each."""
    results = collections.Counter(
        (aval.shape, aval.dtype, state is not None and state.varies)
        for aval, state in zip(step.outputs, step.findings.outputs, strict=True)
    )
    roles = step.signature.roles
    dynamic = enumerate(step.signature.dynamic)
    indices = [index for index, at in dynamic if roles[at] is not Role.MASK]
    for index in sorted(indices, key=lambda index: index not in step.donated):
        aval = step.type_of(index)
        kind = (aval.shape, aval.dtype, step.is_per_replica(index))
        if results[kind] > 0:
            results[kind] -= 1
            if index not in step.donated:
                yield index


def _whole_positions(step: TracedStep, leaves: set[int]) -> tuple[int, ...]:
    """The positions in `args` all of whose arrays are among `leaves`."""
    signature = step.signature
    dynamic = {leaf: index for index, leaf in enumerate(signature.dynamic)}
    found = []
    for position, members in enumerate(signature.positions()):
        arrays = {dynamic[leaf] for leaf in members if leaf in dynamic}
        if arrays and arrays <= leaves:
            found.append(position)
    return tuple(found)


# What XLA says.


def _compiled_collectives(
    executable: Any, replicas: Replicas
) -> tuple[CompiledCollective, ...] | None:
    text = None if executable is None else executable.as_text()
    if text is None:
        return None
    return tuple(compiled_collectives(text, replicas, outermost=__file__))
