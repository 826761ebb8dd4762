"""Checks of a traced step, for what would hang or is likely a mistake: `check`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax.numpy as jnp

from jaxstrategy._src import text
from jaxstrategy._src.contexts.context import LOCAL_SCOPE
from jaxstrategy._src.errors import (
    ContextError,
    DivergentCollectiveError,
    DoubleReductionWarning,
    NotMirroredError,
    NotMirroredVariableError,
    NotMirroredWarning,
)
from jaxstrategy._src.text import Line, listed
from jaxstrategy._src.tracing.checks.varying_results import (
    Unstated,
    forgotten_reductions,
    unexpected_results,
    unstated,
)
from jaxstrategy._src.tracing.jaxprs import (
    COLLECTIVES,
    Effect,
    Equation,
    all_eqns,
    effect_of,
    inner_eqns,
)
from jaxstrategy._src.tracing.replication.types import Collective, Replication, Site
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.tracing.translation import along_replicas
from jaxstrategy._src.values.arrays import PyTree


def divergences(step: TracedStep) -> Iterator[DivergentCollectiveError]:
    """An error for each collective that only some replicas may reach."""
    for found in step.findings.collectives:
        if found.decided_by is None:
            continue
        assert found.decided_at is not None
        what, control = f"the `{name_of(found)}`", _control(found.decided_at)
        line = found.site.merge_line if found.is_merge else found.site.line
        decided, origin = (
            step.line_of(found.decided_by),
            step.origin_of(found.decided_by),
        )
        yield DivergentCollectiveError(
            f"{control.effect.format(step=step.name, what=what)}: it is inside a "
            f"`{control.name}` whose {control.decider} may differ between replicas.\n"
            f"  {what}: {or_unknown(line)}\n"
            f"  the `{control.name}`: {or_unknown(found.decided_at.line)}\n"
            f"  its {control.decider} varies since: {origin}\n"
            f"{control.advice.format(what=what)}",
            collective_line=line and str(line),
            predicate_line=decided and str(decided),
        )


def name_of(found: Collective) -> str:
    """The function that the user calls for a collective, if known."""
    if found.is_merge:
        return "merge_call"
    # Inside of an operation, visible only in its lowering.
    if found.decided_at is not None and found.decided_at.eqns[0] is found.site.eqns[0]:
        return f"collective in {found.site.primitive}"
    return found.site.called(*_COLLECTIVES) or found.site.primitive


# The functions that users call for collectives: ours, and those of `jax.lax`.
_COLLECTIVES = ("all_reduce", "all_gather", "reduce", "gather")
_COLLECTIVES += tuple(name for row in COLLECTIVES.values() for name in row.functions)


@dataclasses.dataclass(frozen=True)
class _Control:
    """The words of messages about a branch or loop."""

    name: str
    decider: str
    effect: str
    advice: str


def _control(site: Site) -> _Control:
    if site.primitive not in ("while", "cond"):
        return dataclasses.replace(_OPERATION, name=site.primitive)
    if site.primitive == "while":
        return _CONTROLS[site.called("fori_loop", "while_loop") or "while_loop"]
    # Both are the primitive `cond`; the Python stack tells them apart, if JAX kept it.
    guess = "switch" if len(site.eqns[0].params["branches"]) > 2 else "cond"
    return _CONTROLS[site.called("switch", "cond") or guess]


_AT_ALL = (
    "Only some replicas of `{step}` would reach {what}, and wait for ever for the "
    "others"
)
_AS_OFTEN = (
    "Some replicas of `{step}` would reach {what} more often than others, and then "
    "wait for ever for them"
)
_OPERATION = _Control(
    "",
    "input",
    _AT_ALL,
    "JAX lowers this operation to branches or loops with collectives, and what decides "
    "there is not known. Reduce its input, so that all replicas do the same: "
    "`get_replica_context().all_reduce('mean', x)`. Or move {what} out of it.",
)
_CONTROLS = {
    control.name: control
    for control in (
        _Control(
            "cond",
            "predicate",
            _AT_ALL,
            "Reduce the predicate, so that all replicas decide alike: "
            "`get_replica_context().all_reduce('max', predicate)` is true if it is on "
            "any replica, 'min' if it is on all. Or move {what} out of the `cond`, and "
            "choose with `jnp.where`.",
        ),
        _Control(
            "switch",
            "index",
            _AT_ALL,
            "Reduce the index, so that all replicas choose the same branch: "
            "`get_replica_context().all_reduce('max', index)`. Or move {what} out of "
            "the `switch`, and choose with `jnp.where`.",
        ),
        _Control(
            "while_loop",
            "condition",
            _AS_OFTEN,
            "Reduce the condition, so that all replicas stop together: a condition of "
            "`get_replica_context().all_reduce('max', condition)` goes on until the "
            "last one is done, 'min' until the first. Or move {what} out of the loop.",
        ),
        _Control(
            "fori_loop",
            "number of turns",
            _AS_OFTEN,
            "Reduce the bounds, so that all replicas take as many turns: "
            "`get_replica_context().all_reduce('max', bound)`. Or move {what} out of "
            "the loop.",
        ),
    )
}


def or_unknown(line: Line | None) -> str:
    return "a line that JAX did not keep" if line is None else str(line)


def double_reductions(step: TracedStep) -> Iterator[tuple[str, Line | None]]:
    """A message and a line for each sum of a value that is reduced already."""
    seen = set()
    for found in step.findings.collectives:
        before = found.reduced_before
        if before is None or _may_be_intended(found.site, before):
            continue
        first, again = step.line_of(before), found.site.line
        # One line may sum a pytree, with an equation for each array or pack of arrays.
        if (first, again) in seen:
            continue
        seen.add((first, again))
        message = (
            f"`{step.name}` sums over the replicas what is the result of a reduction "
            "already, equal on all of them: the sum is that times their number.\n"
            f"  reduced first: {or_unknown(first)}\n"
            f"  summed again: {or_unknown(again)}\n"
            "Leave out one of them. If every replica is meant to count, reduce with "
            "'mean', or divide by `num_replicas_in_sync` before the sum."
        )
        yield message, again


def _may_be_intended(site: Site, before: Replication) -> bool:
    """Whether a second sum may be intended, such as those of differentiation."""
    if site.is_transposed or (before.site is not None and before.site.is_transposed):
        return True
    # A mean, or the derivative of our 'min' and 'max', a weighted mean.
    return site.called("pmean", "_extreme_jvp") is not None


def drifting_variables(step: TracedStep) -> Iterator[NotMirroredVariableError]:
    """An error for each mirrored variable that is assigned a varying value."""
    for name, must_agree, state in step.variables:
        if must_agree and state is not None and state.varies:
            line = step.line_of(state)
            yield NotMirroredVariableError(
                f"Variable {name!r} is mirrored, but `{step.name}` assigns it a value "
                "that may differ between replicas: its copies would drift apart.\n"
                f"  the value varies since: {step.origin_of(state)}\n"
                "Reduce it first, or make the variable with an `aggregation` "
                "('sum', 'mean', 'only_first_replica'), or with "
                "`synchronization='on_read'` if each replica is to have its own.",
                path=name,
                line=line and str(line),
            )


def local_collectives(step: TracedStep) -> Iterator[ContextError]:
    """An error for each collective in local steps, where `all_reduce` makes none."""
    for found in step.findings.collectives:
        stacks = (str(eqn.source_info.name_stack) for eqn in found.site.eqns)
        if not found.is_merge and any(LOCAL_SCOPE in stack for stack in stacks):
            what = name_of(found)
            yield ContextError(
                f"`{step.name}` communicates in local steps, where each replica is by "
                "itself.\n"
                f"  the `{what}`: {or_unknown(found.site.line)}\n"
                "Reduce with `get_replica_context().all_reduce(...)`, outside of "
                "`merge_call`: it takes the replica's own there (for BatchNorm: "
                "`jaxstrategy.flax.linen.BatchNorm`). Or make the steps together: "
                "`strategy.several(step)`."
            )


def _constraint(step: TracedStep, eqn: Equation) -> Iterator[Exception]:
    """An error for a sharding constraint along the replicas.

    JAX raises only where the axis is that of a `shard_map` (0.10 and 0.12).
    """
    if step.replicas.divides_over_replicas(eqn.params["sharding"]):
        where = f"\n  {or_unknown(Site((eqn,)).line)}\n"
        yield along_replicas(step.name, where, step.replicas)


_REDUCTIONS = (Effect.SUM, Effect.EXTREME, Effect.SUM_SCATTER)


def _narrow_sum(step: TracedStep, outer: Equation) -> Iterator[Exception]:
    """An error for a reduction of bfloat16 at which XLA ends the process on a CPU.

    That is in a `shard_map` of the step that leaves an inner axis to XLA, not in one
    that names all, nor outside (JAX 0.10, 0.12).
    """
    replicas = step.replicas
    open_axes = set(replicas.inner_axes).difference(outer.params["newly_manual_axes"])
    is_on_cpu = replicas.devices[0].platform == "cpu"
    if len(replicas.inner_axes) < 2 or not open_axes or not is_on_cpu:
        return
    for eqn in inner_eqns(outer.params):
        is_bfloat16 = any(x.aval.dtype == jnp.bfloat16 for x in eqn.invars)
        if effect_of(eqn) in _REDUCTIONS and is_bfloat16:
            yield NotImplementedError(
                f"`{step.name}` reduces bfloat16 in a `shard_map` that leaves the "
                f"axes {sorted(open_axes)} to XLA, which cannot compile that on a "
                "CPU.\n"
                f"  the `{eqn.primitive.name}`: {or_unknown(Site((eqn,)).line)}\n"
                "Reduce it in float32 (`x.astype('float32')`), or name all inner "
                "axes in `axis_names`."
            )


def _callback(step: TracedStep, eqn: Equation) -> Iterator[Exception]:
    """An error for a host callback, which JAX cannot compile beside automatic axes.

    Whatever the size of these axes (JAX 0.10 and 0.12).
    """
    if sizes := step.replicas.inner_sizes:
        yield NotImplementedError(
            f"`{step.name}` calls the host, and its replicas have several devices, "
            f"{sizes}: JAX calls none from programs that XLA divides over them.\n"
            f"  the `{eqn.primitive.name}`: {or_unknown(Site((eqn,)).line)}\n"
            "Return the value and work on it after the step; print with "
            "`jax.debug.print`, which works; or use one device for each replica."
        )


def _print(step: TracedStep, eqn: Equation) -> Iterator[Exception]:
    """An error for an ordered print on several devices."""
    count = len(step.replicas.all_devices)
    # A callback says so in its effect only (JAX 0.10 and 0.12).
    is_ordered = eqn.params.get("ordered") or (
        str(eqn.params.get("effect", "")) == "OrderedDebug"
    )
    if count > 1 and is_ordered:
        name = f"jax.{eqn.primitive.name.replace('_', '.')}"
        yield ValueError(
            f"`{step.name}` prints with `ordered=True` on {count} devices, and JAX "
            "keeps an order on a single one only.\n"
            f"  the `{name}`: {or_unknown(Site((eqn,)).line)}\n"
            "Leave `ordered=True` out: each line says which replica printed. Or "
            "take one device: `MirroredStrategy(d[:1], replicas_per_device=8)`."
        )


_OF_EQUATIONS = {
    "sharding_constraint": _constraint,
    "shard_map": _narrow_sum,
    "pure_callback": _callback,
    "io_callback": _callback,
    "debug_print": _print,
    "debug_callback": _print,
}


def equations_that_fail(step: TracedStep) -> Iterator[Exception]:
    """An error for each equation that JAX or XLA cannot compile for the replicas."""
    for eqn in all_eqns(step.jaxpr):
        if (errors := _OF_EQUATIONS.get(eqn.primitive.name)) is not None:
            yield from errors(step, eqn)


def check(
    step: TracedStep, expect_mirrored: PyTree, warned: set[type[Warning]]
) -> dict[int, Unstated]:
    """Raises for what would hang or varies unexpectedly; warns of likely mistakes.

    These are sums of reduced values, and state that was mirrored before. Returns the
    results that vary unstated, by their index among leaves.
    """
    for error in _errors(step):
        raise error
    if broken := list(unexpected_results(step, expect_mirrored)):
        error, *others = broken
        if others:
            paths = [other.path or "" for other in others]
            error.add_note(f"The same holds for {listed(paths, 3, '`')}.")
        raise error
    for message, line in double_reductions(step):
        text.warn(message, DoubleReductionWarning, line)
    varying = unstated(step, expect_mirrored)
    for path, message, line in forgotten_reductions(step, varying):
        if step.replicas.state_sharding is not None:
            # A varying value cannot be sharded over the replicas.
            raise NotMirroredError(message, path=path, line=line and str(line))
        if NotMirroredWarning not in warned:
            warned.add(NotMirroredWarning)
            text.warn(message, NotMirroredWarning, line)
    return {
        position: Unstated(step.path(keys), step.origin_of(state))
        for position, (keys, state) in varying.items()
    }


def problems(step: TracedStep, expect_mirrored: PyTree) -> Iterator[str]:
    """All errors and warnings of `check`, in its order."""
    yield from map(str, _errors(step))
    yield from map(str, unexpected_results(step, expect_mirrored))
    yield from (message for message, _ in double_reductions(step))
    forgotten = forgotten_reductions(step, unstated(step, expect_mirrored))
    yield from (message for _, message, _ in forgotten)


def _errors(step: TracedStep) -> Iterator[Exception]:
    """The errors that do not depend on `expect_mirrored`."""
    return itertools.chain(
        divergences(step),
        local_collectives(step),
        drifting_variables(step),
        equations_that_fail(step),
    )
