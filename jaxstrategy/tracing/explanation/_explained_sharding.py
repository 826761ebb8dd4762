"""How the state of a step lies, and why: `sharding_of`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import jax
from jax.extend.core import Literal
from jax.sharding import NamedSharding

from jaxstrategy.replicas._inner_placement import InnerSpec, inner_spec, with_inner
from jaxstrategy.replicas._replicas import Replicas, lies_along
from jaxstrategy.replicas._state_sharding import LeafSharding
from jaxstrategy.text._user_code import Line
from jaxstrategy.tracing._jaxpr_types import ArrayType, Atom, Equation, Var
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.division._divided_step import DividedStep
from jaxstrategy.tracing.explanation._explained_collective import nbytes_of
from jaxstrategy.tracing.explanation._facts import ExplainedCollective
from jaxstrategy.tracing.explanation._sharding_facts import (
    ExplainedLeaf,
    ExplainedSharding,
    UndecidedOperation,
    WholeSum,
)
from jaxstrategy.tracing.replication._collective_table import Effect, effect_of
from jaxstrategy.tracing.replication._levels import Collective
from jaxstrategy.values._types import Leaf


def sharding_of(
    step: TracedStep,
    division: DividedStep,
    exchanged: Sequence[ExplainedCollective],
) -> ExplainedSharding:
    """The facts about a step that is divided.

    Args:
      step: what was traced.
      division: its.
      exchanged: all collectives.
    """
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
    """The facts about a step of which no replica keeps parts.

    Args:
      step: what was traced.
      given: its arguments.
    """
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
    lies = with_inner(inner, replicas, lies_along(sharding.dimension))
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
    undivided = division.borders.undivided
    for result in eqn.outvars:
        if (why := undivided.get(result)) is not None:
            yield from _sums([result], line, why, _reader(division, result, line))
        elif result not in division.borders.sums:
            yield from _sums([result], line, "it is a sum of groups of replicas")


def _reader(division: DividedStep, result: Var, line: Line | None) -> Line | None:
    """The first other line of the replicas' part that reads a sum made at `line`."""
    made_of_it = {result}
    for eqn in division.cut.inside:
        if any(atom in made_of_it for atom in eqn.invars if not _is_literal(atom)):
            made_of_it.update(eqn.outvars)
            at = division.site((eqn,)).line
            if at is not None and at != line:
                return at
    return None


def _is_literal(atom: Atom) -> bool:
    return isinstance(atom, Literal)


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
        for eqns in division.outside.undecided
    )
    for (operation, line), count in counts.items():
        yield UndecidedOperation(operation, count, line)
