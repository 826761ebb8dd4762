"""Collectives that only some replicas would reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxstrategy._errors import DivergentCollectiveError
from jaxstrategy.text._user_code import Line
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.replication._collective_table import COLLECTIVES
from jaxstrategy.tracing.replication._levels import Collective
from jaxstrategy.tracing.replication._site import Site


def divergences(step: TracedStep) -> Iterator[DivergentCollectiveError]:
    """One for each collective that only some replicas may reach."""
    for found in step.findings.collectives:
        if found.decided_by is None:
            continue
        assert found.decided_at is not None
        what, control = f"the `{name_of(found)}`", _control(found.decided_at)
        line = found.site.merge_line if found.is_merge else found.site.line
        decided = step.began(found.decided_by)
        yield DivergentCollectiveError(
            f"{control.effect.format(step=step.name, what=what)}: it is inside a "
            f"`{control.name}` whose {control.decider} may differ between replicas.\n"
            f"  {what}: {or_unknown(line)}\n"
            f"  the `{control.name}`: {or_unknown(found.decided_at.line)}\n"
            f"  its {control.decider} varies since: {step.why(found.decided_by)}\n"
            f"{control.advice.format(what=what)}",
            collective_line=line and str(line),
            predicate_line=decided and str(decided),
        )


def name_of(found: Collective) -> str:
    """The name by which the user calls it, as far as that is known."""
    if found.is_merge:
        return "merge_call"
    # Both are inside of an operation, which only its lowering shows.
    if found.decided_at is not None and found.decided_at.eqns[0] is found.site.eqns[0]:
        return f"collective in {found.site.primitive}"
    return found.site.called(*_COLLECTIVES) or found.site.primitive


# The functions that users call for collectives: ours, and those of `jax.lax`.
_COLLECTIVES = ("all_reduce", "all_gather", "reduce", "gather")
_COLLECTIVES += tuple(name for row in COLLECTIVES.values() for name in row.functions)


@dataclasses.dataclass(frozen=True)
class _Control:
    """The words of messages about a branch or loop.

    Attributes:
      name: of the function that the user calls.
      decider: what decides there.
      effect: of a `decider` that varies.
      advice: what to do then.
    """

    name: str
    decider: str
    effect: str
    advice: str


def _control(site: Site) -> _Control:
    if site.primitive not in ("while", "cond"):
        return dataclasses.replace(_OPERATION, name=site.primitive)
    if site.primitive == "while":
        return _CONTROLS[site.called("fori_loop", "while_loop") or "while_loop"]
    # Both are one primitive, `cond`: the stack tells which it was, where JAX kept it.
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
    """A line, or why there is none."""
    return "a line that JAX did not keep" if line is None else str(line)
