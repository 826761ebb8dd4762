"""Explains a traced step: `explain`."""

from __future__ import annotations

import collections
import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.reductions.rows import part_of_sum
from jaxstrategy._src.replicas.inner_axes import InnerSpec, inner_spec, with_inner
from jaxstrategy._src.replicas.replicas import STACKED, Replicas, sharded_along
from jaxstrategy._src.replicas.state_sharding import LeafSharding
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.text import Line
from jaxstrategy._src.tracing import nnx, signature as _signature
from jaxstrategy._src.tracing.checks.step_checks import problems
from jaxstrategy._src.tracing.explanation import compiled_program
from jaxstrategy._src.tracing.explanation.explanation import (
    DeviceExchange,
    ExplainedCollective,
    ExplainedLeaf,
    ExplainedSharding,
    ExplainedValue,
    Explanation,
    UndecidedOperation,
    WholeSum,
)
from jaxstrategy._src.tracing.jaxprs import (
    COLLECTIVES,
    ArrayType,
    Effect,
    Equation,
    Var,
    all_eqns,
    effect_of,
    function_of,
    is_along,
    origins_of,
    scan_counts,
    variables,
)
from jaxstrategy._src.tracing.partition.partitioned_step import UNKNOWN, PartitionedStep
from jaxstrategy._src.tracing.partition.per_replica_part import Exchange, is_sum_of_all
from jaxstrategy._src.tracing.program import Program
from jaxstrategy._src.tracing.references import source_location
from jaxstrategy._src.tracing.replication.types import Collective, Site
from jaxstrategy._src.tracing.saved_step import Preparation
from jaxstrategy._src.tracing.signature import Role
from jaxstrategy._src.tracing.traced_step import (
    ReplicaStep,
    StepEnvironment,
    TracedStep,
)
from jaxstrategy._src.tracing.vmapped.replicas import on_replicas
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree


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
    """Explains `fn(*args, **kwargs)` on the replicas of a strategy."""
    _, arguments = nnx.as_arrays((args, kwargs), nnx.captured_by(fn))
    leaves, signature = _signature.flatten(fn, arguments, abstract=True)
    replica_step = ReplicaStep(lambda: fn, environment, signature, lambda: True)
    steps: list[TracedStep] = []
    unchecked = dataclasses.replace(options, check_finite=False)
    obtained: list[Any] = []

    def obtain(preparation: Preparation) -> Any:
        lowered = preparation.lower()
        obtained.append(lowered.compile() if compiled else None)
        return obtained[0]

    Program(replica_step, unchecked, steps.append).prepare(leaves, obtain)
    (step,) = steps
    replicas = environment.replicas
    of_xla: dict[str, Any] = {}
    if compiled:
        program = compiled_program.figures(obtained[0])
        of_xla = program.of_explanation()
        if program.module.text:
            between = program.module.collectives(replicas, outermost=__file__)
            of_xla["compiled_collectives"] = tuple(between)
    mirrored, per_replica = _results(step)
    donatable = list(_donatable(step))
    statics = iter(signature.statics)
    # Collectives at the end of local steps have no line: use that of the step.
    location = source_location(replica_step.fn)
    defined = None if location is None else Line(*location)
    collectives = [
        dataclasses.replace(each, line=each.line or defined)
        for each in _collectives(step)
    ]
    return Explanation(
        name=step.name,
        num_replicas=replicas.count,
        collectives=tuple(collectives),
        mirrored=tuple(mirrored),
        per_replica=tuple(per_replica),
        static_arguments={
            label.strip("`"): next(statics)
            for label, role in zip(signature.labels(fn), signature.roles, strict=True)
            if role is Role.STATIC
        },
        variables=tuple(name for name, _, _ in step.variables),
        donated=tuple(_argument(step, index) for index in sorted(step.donated)),
        donatable=tuple(_argument(step, index) for index in donatable),
        donate_argnums=_whole_positions(step, {*step.donated, *donatable}),
        problems=tuple(problems(step, options.expect_mirrored)),
        topology=topology,
        sharding=_sharding(step, leaves, collectives),
        replicas_per_device=replicas.per_device,
        logical_axes=replicas.inner_sizes,
        **of_xla,
    )


# Arguments and results.


def _value(path: str, aval: ArrayType, **more: Any) -> ExplainedValue:
    path, shape = path.strip("`"), tuple(aval.shape)
    return ExplainedValue(path, shape, str(aval.dtype), nbytes_of([aval]), **more)


def _argument(step: TracedStep, index: int) -> ExplainedValue:
    return _value(step.label(index), step.type_of(index))


def _results(step: TracedStep) -> tuple[list[ExplainedValue], list[ExplainedValue]]:
    """Mirrored results, and others."""
    mirrored, per_replica = [], []
    states = step.findings.outputs
    found = zip(step.results.array_paths(), step.outputs, states, strict=True)
    for (_, keys), aval, state in found:
        if state is None or not state.varies:
            mirrored.append(_value(step.path(keys), aval))
        else:
            line, why = step.line_of(state), step.origin_of(state)
            per_replica.append(_value(step.path(keys), aval, line=line, why=why))
    return mirrored, per_replica


def _donatable(step: TracedStep) -> Iterator[int]:
    """Arguments that are not donated, and each have a result of the same type."""
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
    dynamic = {leaf: index for index, leaf in enumerate(step.signature.dynamic)}
    found = []
    for position, members in enumerate(step.signature.leaves_by_position()):
        arrays = {dynamic[leaf] for leaf in members if leaf in dynamic}
        if arrays and arrays <= leaves:
            found.append(position)
    return tuple(found)


# Collectives.


def _collectives(step: TracedStep) -> Iterator[ExplainedCollective]:
    """The collectives over the replicas, in order."""
    if isinstance(step.partitioned, PartitionedStep):
        yield from _per_replica_collectives(step.partitioned)
        yield from _global_collectives(step, step.partitioned)
        return
    replicas = step.replicas
    between: dict[tuple[str, ...], tuple[DeviceExchange, ...]] = {}
    for each in step.findings.collectives:
        eqn, exchanged = each.site.eqns[0], None
        operands = [atom.aval for atom in eqn.invars]
        if replicas.per_device > 1:
            key = (eqn.primitive.name, str(eqn.params), *map(str, operands))
            if key not in between:
                between[key] = tuple(_between_devices(eqn, replicas))
            exchanged = between[key]
        operation = each.site.primitive
        yield _collective(operation, operands, each.site, between_devices=exchanged)


def _collective(
    operation: str, operands: Sequence[ArrayType], site: Site | None, **more: Any
) -> ExplainedCollective:
    """A collective at a site; `more` overrides facts of the site."""
    known = COLLECTIVES.get(operation)
    facts: dict[str, Any] = {
        "operation": operation,
        # No collective is slower than an all-reduce.
        "kind": "all_reduce" if known is None else known.kind,
        "nbytes": nbytes_of(operands),
        "dtypes": tuple(dict.fromkeys(str(aval.dtype) for aval in operands)),
    }
    if site is not None:
        groups = site.eqns[0].params.get("axis_index_groups")
        facts |= {
            "loops": site.loops,
            "in_branch": site.in_branch,
            "groups": tuple(map(tuple, groups)) if groups else None,
            "line": site.line,
            "is_transposed": site.is_transposed,
        }
    return ExplainedCollective(**facts | more)


def nbytes_of(arrays: Iterable[ArrayType]) -> int:
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in arrays)


def _between_devices(eqn: Equation, replicas: Replicas) -> Iterator[DeviceExchange]:
    """The collectives between devices for one of replicas that share them."""
    function, operands = function_of(eqn), [atom.aval for atom in eqn.invars]

    def one_replica(*inputs: Leaf) -> list[jax.Array]:
        results = function(*(lax.squeeze(x, (0,)) for x in inputs))
        return [x[None] for x in results]

    everywhere = on_replicas(one_replica, replicas, [STACKED] * len(operands), STACKED)
    count = replicas.count
    shapes = [jax.ShapeDtypeStruct((count, *x.shape), x.dtype) for x in operands]
    for inner in all_eqns(jax.make_jaxpr(everywhere)(*shapes).jaxpr):
        known = COLLECTIVES.get(inner.primitive.name)
        if known is not None and is_along(inner, replicas.axes):
            # The operands of one device are reduced first, in the same equation.
            atoms = inner.outvars if known.kind == "all_reduce" else inner.invars
            yield DeviceExchange(known.kind, nbytes_of(x.aval for x in atoms))


def _per_replica_collectives(
    partitioned: PartitionedStep,
) -> Iterator[ExplainedCollective]:
    """The collectives of the per-replica part: the user's, and those for shards."""
    eqns, scatters = partitioned.partition.per_replica, partitioned.reduce_scatters
    origins = origins_of(eqns)
    own: dict[int, list[Collective]] = collections.defaultdict(list)
    for found in partitioned.collectives:
        own[id(found.site.eqns[-1])].append(found)
    exchanges: dict[int, list[Exchange]] = collections.defaultdict(list)
    for exchange in partitioned.per_replica_part.exchanges:
        exchanges[id(exchange.before)].append(exchange)
    for eqn in eqns:
        gathers = [each for each in exchanges[id(eqn)] if each.kind == "all_gather"]
        for exchange in gathers:
            yield _explained_exchange(partitioned, exchange, origins)
        for found in own[id(eqn)]:
            inner = found.site.eqns
            operands = [atom.aval for atom in inner[0].invars]
            if len(inner) == 1 and is_sum_of_all(inner[0], partitioned.replicas):
                # Without those that become reduce-scatters.
                pairs = zip(operands, inner[0].outvars, strict=True)
                operands = [aval for aval, sum_ in pairs if sum_ not in scatters.sums]
            if operands:
                yield _collective(
                    found.site.primitive, operands, partitioned.site(inner)
                )
        # Those of shard functions.
        function = partitioned.per_replica_part.functions.get(id(eqn))
        if function is not None:
            name = _label(partitioned, eqn.invars[function.divided[0]], origins)
            of_parts, divided = function.of_parts, function.divided
            yield from _traced(partitioned, eqn, of_parts, divided, name)
        for result in eqn.outvars:
            found = scatters.sums.get(result)
            for call in () if found is None else found.updates:
                yield from _traced(
                    partitioned, call, _part_of_sum(call, result), (), ""
                )
        for exchange in exchanges[id(eqn)]:
            if exchange not in gathers:
                yield _explained_exchange(partitioned, exchange, origins)


def _explained_exchange(
    partitioned: PartitionedStep, exchange: Exchange, origins: Mapping[Var, Equation]
) -> ExplainedCollective:
    """A gather or reduce-scatter for sharded state."""
    loop, is_gather = exchange.loop, exchange.kind == "all_gather"
    turns = () if loop is None else (loop.params["length"],)
    more: dict[str, Any] = {"loops": turns, "in_branch": False, "groups": None}
    if is_gather:
        more["is_transposed"] = False
        more["array"] = _label(partitioned, exchange.var, origins)
        more["parts"] = partitioned.replicas.parts
        more["why"] = _why_gathered(partitioned, exchange)
    else:
        more["why"] = "each replica needs its part of the sum only"
    eqn = exchange.before if is_gather else origins[exchange.var]
    parts = math.prod(turns) * more.get("parts", 1)
    more["nbytes"] = nbytes_of([exchange.type]) // parts
    site = partitioned.site((eqn,))
    return _collective(exchange.kind, [exchange.type], site, cause="sharding", **more)


def _label(
    partitioned: PartitionedStep, var: Var, origins: Mapping[Var, Equation]
) -> str:
    """The argument from which a value is converted, if any."""
    leaves = partitioned.layout.leaves
    while var not in leaves:
        origin = origins.get(var)
        if origin is None or origin.primitive.name != "convert_element_type":
            return ""
        var = origin.invars[0]
    return leaves[var].label.strip("`")


def _why_gathered(partitioned: PartitionedStep, exchange: Exchange) -> str:
    if exchange.loop is not None:
        return "in the turns of the loop over its layers"
    if exchange.before.primitive.name == "remat2":
        return "again, for what is computed a second time"
    for eqn in partitioned.partition.per_replica:
        is_loop = eqn.primitive.name == "scan"
        layers = eqn.invars[sum(scan_counts(eqn)) :] if is_loop else ()
        if any(atom is exchange.var for atom in layers):
            if partitioned.per_replica_part.dimensions.get(exchange.var) == 0:
                return "whole for a loop, along whose turns it is divided"
            return "whole, as it is used outside of the loop over its layers too"
    return "whole from its first use on"


def _traced(
    partitioned: PartitionedStep,
    eqn: Equation,
    function: Callable[..., Any],
    divided: Sequence[int],
    name: str,
) -> Iterator[ExplainedCollective]:
    """The collectives of a function that takes shards of some operands."""
    operands = []
    for place, atom in enumerate(eqn.invars):
        shape = atom.aval.shape
        if shape and place in divided:
            shape = (shape[0] // partitioned.replicas.parts, *shape[1:])
        operands.append(jax.ShapeDtypeStruct(shape, atom.aval.dtype))
    replicas = partitioned.replicas
    jaxpr = jax.make_jaxpr(
        lambda *operands: function(*operands, axes=replicas.axes),
        axis_env=replicas.axis_sizes,
    )(*operands).jaxpr
    for inner in all_eqns(jaxpr):
        if inner.primitive.name in COLLECTIVES:
            yield _collective(
                inner.primitive.name,
                [atom.aval for atom in inner.invars],
                Site((inner,)),
                line=partitioned.site((eqn,)).line,
                cause="sharding",
                array=name,
                why="for rows of a table of which each replica has a part",
            )


def _part_of_sum(call: Equation, result: Var) -> Callable[..., jax.Array]:
    """The function that computes a part of a sum from the rows of an equation."""
    shape, dtype = call.invars[0].aval.shape, result.aval.dtype

    def of_parts(zeros: jax.Array, *rows: jax.Array, axes: tuple[str, ...]):
        return part_of_sum(shape, *rows, axes=axes, dtype=dtype)

    return of_parts


def _global_collectives(
    step: TracedStep, partitioned: PartitionedStep
) -> Iterator[ExplainedCollective]:
    """The collectives that XLA inserts into the global part."""
    more: dict[str, Any] = {"cause": "compiler", "is_transposed": False}
    outside = partitioned.global_part
    for exchange in outside.exchanges:
        site, why = partitioned.site(exchange.eqns), "of parts"
        yield _collective(exchange.kind, [exchange.type], site, why=why, **more)
    varies = zip(step.results.array_paths(), step.varies, strict=True)
    names = [step.path(keys) for (_, keys), differs in varies if not differs]
    for var in partitioned.variables:
        # Without a layout, it is passed through.
        leaf = partitioned.layout.leaves.get(var)
        names.append("an unused variable" if leaf is None else leaf.label)
    origins = origins_of(partitioned.partition.global_)
    done: set[Var] = set()
    parts = partitioned.replicas.parts
    for name, (atom, layout, first) in zip(
        names, partitioned.common_results, strict=True
    ):
        if isinstance(atom, Literal) or atom in done or outside.is_whole(atom):
            continue
        done.add(atom)
        # How a result computed from shards gets its sharding.
        made, divided = outside.dimension(atom), first if layout is None else layout
        moves = []
        if made != UNKNOWN and divided not in (None, made):
            moves.append(("all_to_all", "divided along another dimension"))
        if layout is None and (first is not None or made != UNKNOWN):
            moves.append(("all_gather", "a whole result that is computed in parts"))
        eqn = origins.get(atom)
        for kind, why in moves:
            yield _collective(
                kind,
                [atom.aval],
                None if eqn is None else partitioned.site((eqn,)),
                nbytes=nbytes_of([atom.aval]) // parts,
                array=name.strip("`"),
                why=why,
                parts=parts,
                **more,
            )


# Sharded state.


def _sharding(
    step: TracedStep, leaves: Sequence[Leaf], collectives: Sequence[ExplainedCollective]
) -> ExplainedSharding | None:
    """The shardings of state, and the collectives for them; None without any."""
    replicas, partitioned = step.replicas, step.partitioned
    chosen = replicas.state_sharding
    is_divided = isinstance(partitioned, PartitionedStep)
    if is_divided:
        layout = partitioned.layout
        state = [
            (leaf.label, leaf.type, leaf.sharding, leaf.inner)
            for leaf in layout.leaves.values()
        ]
        lie, placements = layout.results, layout.shardings
    elif chosen is None and not replicas.inner_axes:
        return None
    else:
        whole = LeafSharding(None, _why_undivided(replicas))
        state = [
            (step.label(i), step.type_of(i), whole, inner_spec(leaves[i], replicas))
            for i in step.same_arguments
        ]
        state += [
            (f"variable {each.name!r}", each.cell, whole, inner_spec(each, replicas))
            for each in step.used_inputs.values()
            if each.copies_must_agree
        ]
        lie = [whole] * len(step.outputs)
        placements = [step.output_shardings.get(i) for i in range(len(step.outputs))]
    inner = [
        inner_spec(types.SimpleNamespace(sharding=each), replicas)
        for each in placements
    ]
    paths = [step.path(keys) for _, keys in step.results.array_paths()]
    results = zip(paths, step.outputs, lie, inner, strict=True)
    return ExplainedSharding(
        shard=None if chosen is None else chosen.shard,
        num_replicas=replicas.count,
        leaves=tuple(_leaf(*leaf, replicas) for leaf in state),
        results=tuple(
            _leaf(*result, replicas)
            for result, varies in zip(results, step.varies, strict=True)
            if not varies
        ),
        collectives=tuple(each for each in collectives if each.cause != "step"),
        whole_sums=tuple(_whole_sums(partitioned)) if is_divided else (),
        undecided=tuple(_undecided(partitioned)) if is_divided else (),
    )


def _why_undivided(replicas: Replicas) -> str:
    if replicas.state_sharding is None:
        return "the strategy has no `sharding`"
    if replicas.count == 1:
        return "there is one replica"
    if replicas.per_device > 1:
        return "all replicas share one device"
    return "the step says what each device of a replica does, in a `shard_map`"


def _leaf(
    path: str,
    aval: ArrayType,
    sharding: LeafSharding,
    inner: InnerSpec,
    replicas: Replicas,
) -> ExplainedLeaf:
    layout = with_inner(inner, replicas, sharded_along(sharding.dimension))
    shape = tuple(aval.shape)
    on_device = jax.ShapeDtypeStruct(layout.shard_shape(shape), aval.dtype)
    return ExplainedLeaf(
        path=path.strip("`"),
        shape=shape,
        dtype=str(aval.dtype),
        nbytes=nbytes_of([aval]),
        device_bytes=nbytes_of([on_device]),
        dimension=sharding.dimension,
        reason=sharding.reason,
        inner=inner,
    )


def _whole_sums(partitioned: PartitionedStep) -> Iterator[WholeSum]:
    """The large sums that are no reduce-scatters."""
    chosen = partitioned.replicas.state_sharding
    leaves = partitioned.layout.leaves.values()
    # If only variables are sharded, sums of the same shape count.
    divided = {tuple(leaf.type.shape) for leaf in leaves if not leaf.sharding.is_whole}
    for found in partitioned.collectives:
        site = partitioned.site(found.site.eqns)
        for result, reason in _undivided(partitioned, found.site.eqns, site):
            aval = result.aval
            shape, nbytes = tuple(aval.shape), nbytes_of([aval])
            is_large = nbytes >= chosen.min_bytes if chosen else shape in divided
            if shape and is_large:
                reader = None
                if result in partitioned.reduce_scatters.reasons:
                    reader = _reader(partitioned, result, site.line)
                dtype = str(aval.dtype)
                yield WholeSum(shape, dtype, nbytes, site.line, reason, reader)


def _undivided(
    partitioned: PartitionedStep, eqns: Sequence[Equation], site: Site
) -> Iterator[tuple[Var, str]]:
    """The sums of a collective that are not scattered, and why."""
    eqn, scatters = eqns[0], partitioned.reduce_scatters
    names = [holder.primitive.name for holder in eqns[1:]]
    effect = effect_of(eqn)
    if effect is Effect.GATHER and site.called("all_reduce") == "all_reduce":
        reason = "it is made by a scatter and a gather, as options asked for"
    elif effect is not Effect.SUM:
        return
    elif not {"scan", "while"}.isdisjoint(names):
        reason = "it is summed inside a loop"
    elif "cond" in names:
        reason = "it is summed inside a branch"
    elif names:
        reason = f"it is summed inside a function that JAX keeps apart (`{names[0]}`)"
    else:
        reason = "it is a sum of groups of replicas"
    for result in eqn.outvars:
        if effect is Effect.GATHER or names or result not in scatters.sums:
            yield result, scatters.reasons.get(result, reason)


def _reader(
    partitioned: PartitionedStep, result: Var, line: Line | None
) -> Line | None:
    """The first other line of the per-replica part that reads a sum of `line`."""
    made_of_it = {result}
    for eqn in partitioned.partition.per_replica:
        if not made_of_it.isdisjoint(variables(eqn.invars)):
            made_of_it.update(eqn.outvars)
            at = partitioned.site((eqn,)).line
            if at is not None and at != line:
                return at
    return None


def _undecided(partitioned: PartitionedStep) -> Iterator[UndecidedOperation]:
    """The operations for which XLA chooses collectives, by line."""
    counts = collections.Counter(
        (eqns[0].primitive.name, partitioned.site(eqns).line)
        for eqns in partitioned.global_part.undecided
    )
    for (operation, line), count in counts.items():
        yield UndecidedOperation(operation, count, line)
