"""From a traced step to its explanation."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import jax
from jax import lax
from jax.extend.core import Literal
from jax.sharding import NamedSharding

from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.reductions.rows import part_of_sum
from jaxstrategy._src.replicas.inner_axes import InnerSpec, inner_spec, with_inner
from jaxstrategy._src.replicas.replica_placements import (
    SPLIT,
    sharded_along,
)
from jaxstrategy._src.replicas.replicas import (
    Replicas,
)
from jaxstrategy._src.replicas.state_sharding import LeafSharding
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.text.user_code import Line
from jaxstrategy._src.tracing import roles as _roles
from jaxstrategy._src.tracing.checks.step_checks import problems
from jaxstrategy._src.tracing.explanation import compiled_program
from jaxstrategy._src.tracing.explanation.compiled_program import compiled_collectives
from jaxstrategy._src.tracing.explanation.explanation import Explanation
from jaxstrategy._src.tracing.explanation.facts import (
    CompiledCollective,
    DeviceExchange,
    ExplainedCollective,
    ExplainedLeaf,
    ExplainedSharding,
    ExplainedValue,
    UndecidedOperation,
    WholeSum,
)
from jaxstrategy._src.tracing.functions.code import place_of
from jaxstrategy._src.tracing.jaxprs.rewrite import function_of
from jaxstrategy._src.tracing.jaxprs.visit import (
    COLLECTIVES,
    ArrayType,
    Effect,
    Equation,
    Var,
    all_eqns,
    effect_of,
    is_along,
    origins_of,
    variables,
)
from jaxstrategy._src.tracing.nnx import object_calls
from jaxstrategy._src.tracing.on_replicas import on_replicas
from jaxstrategy._src.tracing.partition.divided_step import DividedStep
from jaxstrategy._src.tracing.partition.global_part import UNKNOWN
from jaxstrategy._src.tracing.partition.per_replica_part import Exchange
from jaxstrategy._src.tracing.partition.reduce_scatters import is_sum_of_all
from jaxstrategy._src.tracing.program import Program
from jaxstrategy._src.tracing.replica_step import ReplicaStep, StepEnvironment
from jaxstrategy._src.tracing.replication.control import scan_counts
from jaxstrategy._src.tracing.replication.types import Collective, Site
from jaxstrategy._src.tracing.roles import Role
from jaxstrategy._src.tracing.stages.stage import Stage
from jaxstrategy._src.tracing.stages.stages import stages_of
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree


def explained(
    site: Site, operands: Sequence[ArrayType], **more: Any
) -> ExplainedCollective:
    """The collective at a place."""
    groups = site.eqns[0].params.get("axis_index_groups")
    known = COLLECTIVES.get(site.primitive)
    told: dict[str, Any] = {
        "operation": site.primitive,
        # Nothing takes longer than an all-reduce of as much.
        "kind": "all_reduce" if known is None else known.kind,
        "nbytes": nbytes_of(operands),
        "dtypes": tuple(dict.fromkeys(str(aval.dtype) for aval in operands)),
        "loops": site.loops,
        "in_branch": site.in_branch,
        "groups": tuple(map(tuple, groups)) if groups else None,
        "line": site.line,
        "is_transposed": site.is_transposed,
    }
    return ExplainedCollective(**told | more)


def nbytes_of(types: Sequence[ArrayType]) -> int:
    """The bytes of arrays of these types."""
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in types)


def _between_devices(eqn: Equation, replicas: Replicas) -> Iterator[DeviceExchange]:
    """What devices exchange for an equation of replicas that share them."""
    function, types = function_of(eqn), [atom.aval for atom in eqn.invars]

    def one_replica(*given: Leaf) -> list[jax.Array]:
        results = function(*(lax.squeeze(x, (0,)) for x in given))
        return [x[None] for x in results]

    everywhere = on_replicas(one_replica, replicas, [SPLIT] * len(types), SPLIT)
    shapes = [jax.ShapeDtypeStruct((replicas.count, *x.shape), x.dtype) for x in types]
    for inner in all_eqns(jax.make_jaxpr(everywhere)(*shapes).jaxpr):
        known = COLLECTIVES.get(inner.primitive.name)
        if known is not None and is_along(inner, replicas.axes):
            # Those of a device are reduced before, in the same equation.
            atoms = inner.outvars if known.kind == "all_reduce" else inner.invars
            yield DeviceExchange(known.kind, nbytes_of([x.aval for x in atoms]))


def collectives_of(
    division: DividedStep, names: Sequence[str]
) -> Iterator[ExplainedCollective]:
    """What the program does, in order."""
    yield from _PerReplicaPart(division).all()
    yield from _outside(division, names)


@final
class _PerReplicaPart:
    """Those of the part of each replica."""

    def __init__(self, division: DividedStep) -> None:
        self._division = division
        self._eqns = division.partition.per_replica
        self._count = division.replicas.parts
        self._origins = origins_of(self._eqns)
        self._found: dict[int, list[Collective]] = collections.defaultdict(list)
        for found in division.collectives:
            self._found[id(found.site.eqns[-1])].append(found)
        self._made: dict[int, list[Exchange]] = collections.defaultdict(list)
        for exchange in division.per_replica_part.exchanges:
            self._made[id(exchange.before)].append(exchange)

    def all(self) -> Iterator[ExplainedCollective]:
        for eqn in self._eqns:
            made = self._made[id(eqn)]
            gathers = [each for each in made if each.kind == "all_gather"]
            yield from map(self._gather, gathers)
            for found in self._found[id(eqn)]:
                yield from self._own(found)
            yield from self._of_functions(eqn)
            yield from map(
                self._scatter, (each for each in made if each not in gathers)
            )

    def _own(self, found: Collective) -> Iterator[ExplainedCollective]:
        """One of the step's, but for the sums that are divided."""
        eqns = found.site.eqns
        operands = [atom.aval for atom in eqns[0].invars]
        if len(eqns) == 1 and is_sum_of_all(eqns[0], self._division.replicas):
            sums = self._division.reduce_scatters.sums
            pairs = zip(operands, eqns[0].outvars, strict=True)
            operands = [operand for operand, result in pairs if result not in sums]
        if operands:
            yield explained(self._division.site(eqns), operands)

    def _scatter(self, exchange: Exchange) -> ExplainedCollective:
        """A sum of which each replica gets its part."""
        turns = _turns(exchange.loop)
        site = self._division.site((self._origins[exchange.var],))
        return ExplainedCollective(
            operation="reduce_scatter",
            kind="reduce_scatter",
            nbytes=nbytes_of([exchange.type]) // math.prod(turns),
            dtypes=(str(exchange.type.dtype),),
            loops=turns,
            in_branch=False,
            groups=None,
            line=site.line,
            is_transposed=site.is_transposed,
            cause="sharding",
            why="each replica needs its part of the sum only",
        )

    def _gather(self, exchange: Exchange) -> ExplainedCollective:
        """An array that each replica has a part of and needs all of."""
        turns = _turns(exchange.loop)
        nbytes = nbytes_of([exchange.type]) // math.prod(turns) // self._count
        return ExplainedCollective(
            operation="all_gather",
            kind="all_gather",
            nbytes=nbytes,
            dtypes=(str(exchange.type.dtype),),
            loops=turns,
            in_branch=False,
            groups=None,
            line=self._division.site((exchange.before,)).line,
            is_transposed=False,
            cause="sharding",
            array=self._label(exchange.var),
            why=self._why(exchange),
            parts=self._count,
        )

    def _label(self, var: Var) -> str:
        """The argument that a value is, perhaps in another dtype."""
        leaves = self._division.layout.leaves
        while var not in leaves:
            origin = self._origins.get(var)
            if origin is None or origin.primitive.name != "convert_element_type":
                return ""
            var = origin.invars[0]
        return leaves[var].label.strip("`")

    def _why(self, exchange: Exchange) -> str:
        if exchange.loop is not None:
            return "in the turns of the loop over its layers"
        if exchange.before.primitive.name in ("checkpoint", "remat", "remat2"):
            return "again, for what is computed a second time"
        loops = [eqn for eqn in self._eqns if _is_layered(eqn, exchange.var)]
        if not loops:
            return "whole from its first use on"
        if self._division.per_replica_part.dimensions.get(exchange.var) == 0:
            return "whole for a loop, along whose turns it is divided"
        return "whole, as it is used outside of the loop over its layers too"

    def _of_functions(self, eqn: Equation) -> Iterator[ExplainedCollective]:
        """What functions use that are computed from parts."""
        division = self._division
        if (function := division.per_replica_part.functions.get(id(eqn))) is not None:
            name = self._label(eqn.invars[function.divided[0]])
            yield from self._traced(eqn, function.of_parts, function.divided, name)
        for result in eqn.outvars:
            for call in division.reduce_scatters.of_functions.get(result, ()):
                yield from self._traced(call, _summing(call, result), (), "")

    def _traced(
        self, eqn: Equation, function, divided: Sequence[int], name: str
    ) -> Iterator[ExplainedCollective]:
        """The collectives of a function that takes parts of some operands."""
        replicas = self._division.replicas
        types = [
            _part(atom.aval, self._count if place in divided else 1)
            for place, atom in enumerate(eqn.invars)
        ]
        axes = replicas.collective_axes
        jaxpr = jax.make_jaxpr(
            lambda *operands: function(*operands, axes=axes),
            axis_env=replicas.axis_sizes,
        )(*types).jaxpr
        for inner in all_eqns(jaxpr):
            if inner.primitive.name in COLLECTIVES:
                yield explained(
                    Site((inner,)),
                    [atom.aval for atom in inner.invars],
                    line=self._division.site((eqn,)).line,
                    cause="sharding",
                    array=name,
                    why="for rows of a table of which each replica has a part",
                )


def _summing(call: Equation, result: Var) -> Callable[..., jax.Array]:
    """How parts of a sum are made of the rows that an equation adds."""
    shape, dtype = call.invars[0].aval.shape, result.aval.dtype

    def of_parts(zeros: jax.Array, *rows: jax.Array, axes: tuple[str, ...]):
        return part_of_sum(shape, *rows, axes=axes, dtype=dtype)

    return of_parts


def _part(aval: ArrayType, count: int) -> jax.ShapeDtypeStruct:
    if not aval.shape:
        return jax.ShapeDtypeStruct((), aval.dtype)
    return jax.ShapeDtypeStruct((aval.shape[0] // count, *aval.shape[1:]), aval.dtype)


def _turns(loop: Equation | None) -> tuple[int, ...]:
    return () if loop is None else (loop.params["length"],)


def _is_layered(eqn: Equation, var: Var) -> bool:
    """Whether an equation is a loop that reads one layer of `var` in each turn."""
    if eqn.primitive.name != "scan":
        return False
    return any(atom is var for atom in eqn.invars[sum(scan_counts(eqn)) :])


# Where it is computed once for all.


def _outside(
    division: DividedStep, names: Sequence[str]
) -> Iterator[ExplainedCollective]:
    outside = division.global_part
    for exchange in outside.exchanges:
        site = division.site(exchange.eqns)
        yield _by_compiler(exchange.kind, exchange.type, site, 1, "of parts")
    origins = origins_of(division.partition.global_)
    done: set[Var] = set()
    for name, (atom, lies, first) in zip(names, division.kept, strict=True):
        if isinstance(atom, Literal) or atom in done or outside.is_whole(atom):
            continue
        done.add(atom)
        eqn = origins.get(atom)
        site = None if eqn is None else division.site((eqn,))
        for kind, why in _moves(outside.dimension(atom), lies, first):
            parts = division.replicas.parts
            yield _by_compiler(kind, atom.aval, site, parts, why, name)


def _moves(
    made: int | None, lies: int | None, first: int | None
) -> Iterator[tuple[str, str]]:
    """How a result that was made of parts comes to lie where it is to."""
    divided = first if lies is None else lies
    if made != UNKNOWN and divided not in (None, made):
        yield "all_to_all", "divided along another dimension"
    if lies is None and (first is not None or made != UNKNOWN):
        yield "all_gather", "a whole result that is computed in parts"


def _by_compiler(
    kind: str, aval: ArrayType, site: Site | None, parts: int, why: str, name: str = ""
) -> ExplainedCollective:
    return ExplainedCollective(
        operation=kind,
        kind=kind,
        nbytes=nbytes_of([aval]) // parts,
        dtypes=(str(aval.dtype),),
        loops=() if site is None else site.loops,
        in_branch=site is not None and site.in_branch,
        groups=None,
        line=None if site is None else site.line,
        is_transposed=False,
        cause="compiler",
        array=name,
        why=why,
        parts=parts,
    )


def sharding_of(
    step: TracedStep,
    division: DividedStep,
    exchanged: Sequence[ExplainedCollective],
) -> ExplainedSharding:
    """The facts about a step that is divided."""
    replicas = division.replicas
    leaves = [
        _leaf(leaf.label, leaf.type, leaf.sharding, replicas, leaf.inner)
        for leaf in division.layout.leaves.values()
    ]
    paths = [step.path(keys) for _, keys in step.results.array_paths()]
    layout = division.layout
    inner = [inner_spec(each, replicas) for each in map(_Placed, layout.placements)]
    results = zip(paths, step.outputs, layout.results, inner, strict=True)
    return ExplainedSharding(
        shard=_shard(replicas),
        num_replicas=replicas.count,
        leaves=tuple(leaves),
        results=tuple(
            _leaf(path, aval, sharding, replicas, inner)
            for (path, aval, sharding, inner), varies in zip(
                results, step.trace.varies, strict=True
            )
            if not varies
        ),
        collectives=tuple(each for each in exchanged if each.cause != "step"),
        whole_sums=tuple(_whole_sums(division)),
        undecided=tuple(_undecided(division)),
    )


def undivided(step: TracedStep, given: Sequence[Leaf]) -> ExplainedSharding:
    """The facts about a step of which no replica keeps parts."""
    replicas = step.trace.replicas
    whole = LeafSharding(None, _reason(replicas))
    arguments = [
        (step.label(i), step.type_of(i), inner_spec(given[i], replicas))
        for i in step.same_arguments
    ]
    variables = [
        (f"variable {each.name!r}", each.cell, inner_spec(each, replicas))
        for each in step.trace.variables
        if each in step.trace.used and each.copies_must_agree
    ]
    results = enumerate(zip(step.results.array_paths(), step.outputs, strict=True))
    return ExplainedSharding(
        shard=_shard(replicas),
        num_replicas=replicas.count,
        leaves=tuple(
            _leaf(name, aval, whole, replicas, inner)
            for name, aval, inner in [*arguments, *variables]
        ),
        results=tuple(
            _leaf(step.path(keys), aval, whole, replicas, _kept(step, number))
            for number, ((_, keys), aval) in results
            if not step.trace.varies[number]
        ),
        collectives=(),
        whole_sums=(),
        undecided=(),
    )


def _reason(replicas: Replicas) -> str:
    if replicas.state_sharding is None:
        return "the strategy has no `sharding`"
    if replicas.count == 1:
        return "there is one replica"
    if replicas.per_device > 1:
        return "all replicas share one device"
    return "the step says what each device of a replica does, in a `shard_map`"


def _kept(step: TracedStep, number: int) -> InnerSpec:
    """How a result lies over inner axes, if it takes the place of an argument."""
    return inner_spec(_Placed(step.placements.get(number)), step.trace.replicas)


@dataclasses.dataclass(frozen=True)
class _Placed:
    """Something that lies somewhere, or where XLA wants."""

    sharding: NamedSharding | None


def kept_names(step: TracedStep, division: DividedStep) -> list[str]:
    """The names of `division.kept`."""
    paths = [step.path(keys) for _, keys in step.results.array_paths()]
    pairs = zip(paths, step.trace.varies, strict=True)
    own = [path for path, varies in pairs if not varies]
    leaves = division.layout.leaves
    # One that the step might use, and does not, goes through as it is.
    used = map(leaves.get, division.variables)
    own += [leaf.label if leaf is not None else "an unused variable" for leaf in used]
    return [name.strip("`") for name in own]


def _shard(replicas: Replicas) -> str | None:
    chosen = replicas.state_sharding
    return None if chosen is None else chosen.shard


def _leaf(
    path: str,
    aval: ArrayType,
    sharding: LeafSharding,
    replicas: Replicas,
    inner: InnerSpec,
) -> ExplainedLeaf:
    lies = with_inner(inner, replicas, sharded_along(sharding.dimension))
    shape = tuple(aval.shape)
    on_device = jax.ShapeDtypeStruct(lies.shard_shape(shape), aval.dtype)
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


# The sums that are not divided.


def _whole_sums(division: DividedStep) -> Iterator[WholeSum]:
    chosen = division.replicas.state_sharding
    leaves = division.layout.leaves.values()
    # Where variables only are divided, what is like one of them.
    divided = {tuple(leaf.type.shape) for leaf in leaves if not leaf.sharding.is_whole}
    for found in division.collectives:
        for each in _of_collective(division, found):
            if each.shape and (
                each.shape in divided
                if chosen is None
                else each.nbytes >= chosen.min_bytes
            ):
                yield each


def _of_collective(division: DividedStep, found: Collective) -> Iterator[WholeSum]:
    eqns = found.site.eqns
    eqn, line = eqns[0], division.site(eqns).line
    if effect_of(eqn) is Effect.GATHER:
        if division.site(eqns).called("all_reduce") == "all_reduce":
            reason = "it is made by a scatter and a gather, as options asked for"
            yield from _sums(eqn.outvars, line, reason)
        return
    if effect_of(eqn) is not Effect.SUM:
        return
    if len(eqns) > 1:
        yield from _sums(eqn.outvars, line, _around(eqns[1:]))
        return
    undivided = division.reduce_scatters.undivided
    for result in eqn.outvars:
        if (why := undivided.get(result)) is not None:
            yield from _sums([result], line, why, _reader(division, result, line))
        elif result not in division.reduce_scatters.sums:
            yield from _sums([result], line, "it is a sum of groups of replicas")


def _reader(division: DividedStep, result: Var, line: Line | None) -> Line | None:
    """The first other line of the replicas' part that reads a sum made at `line`."""
    made_of_it = {result}
    for eqn in division.partition.per_replica:
        if not made_of_it.isdisjoint(variables(eqn.invars)):
            made_of_it.update(eqn.outvars)
            at = division.site((eqn,)).line
            if at is not None and at != line:
                return at
    return None


def _sums(
    results: Iterable, line: Line | None, reason: str, reader: Line | None = None
) -> Iterator[WholeSum]:
    for result in results:
        aval = result.aval
        yield WholeSum(
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            nbytes=nbytes_of([aval]),
            line=line,
            reason=reason,
            reader=reader,
        )


def _around(holders: Sequence[Equation]) -> str:
    """What holds a sum that stands in no step itself."""
    names = [eqn.primitive.name for eqn in holders]
    if not {"scan", "while"}.isdisjoint(names):
        return "it is summed inside a loop"
    if "cond" in names:
        return "it is summed inside a branch"
    return f"it is summed inside a function that JAX keeps apart (`{names[0]}`)"


def _undecided(division: DividedStep) -> Iterator[UndecidedOperation]:
    """The operations of which XLA chooses the exchanges, by line."""
    counts = collections.Counter(
        (eqns[0].primitive.name, division.site(eqns).line)
        for eqns in division.global_part.undecided
    )
    for (operation, line), count in counts.items():
        yield UndecidedOperation(operation, count, line)


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
    """A description of `fn(*args, **kwargs)` on the replicas of a strategy."""
    fn, args, kwargs, options = object_calls.as_arrays(fn, args, kwargs, options)
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
        memory=compiled_program.memory(executable),
        flops=compiled_program.flops(executable),
        sharding=sharding,
        replicas_per_device=environment.replicas.per_device,
        logical_axes=environment.replicas.inner_sizes,
        compiled_collectives=_compiled_collectives(executable, environment.replicas),
        has_loops=executable is not None and compiled_program.has_loops(executable),
    )


class _Collected(Stage):
    """Keeps what was traced."""

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
    between: dict[tuple[str, ...], tuple[DeviceExchange, ...]] = {}
    found = []
    for each in step.findings.collectives:
        eqn, exchanged = each.site.eqns[0], None
        types = [atom.aval for atom in eqn.invars]
        if replicas.per_device > 1:
            key = (eqn.primitive.name, str(eqn.params), *map(str, types))
            if key not in between:
                between[key] = tuple(_between_devices(eqn, replicas))
            exchanged = between[key]
        found.append(explained(each.site, types, between_devices=exchanged))
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
