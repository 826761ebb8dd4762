"""Collectives: what they make equal, and sums of what is reduced already."""

from __future__ import annotations

from typing import Any

from jaxstrategy.tracing._site import Site
from jaxstrategy.tracing.replication._analysis import Frame
from jaxstrategy.tracing.replication._shares import is_mean, is_share
from jaxstrategy.tracing.replication._state import (
    SAME,
    Collective,
    Level,
    State,
    computed,
    for_all,
    join,
    level_of,
    not_reduced,
    varying_since,
)


def each(frame: Frame, eqn: Any, operands: list[Any]) -> list[Any]:
    """Several operations at once, each of one operand."""
    if len(operands) != len(eqn.outvars):
        return for_all(eqn, computed(eqn, operands))
    return [computed(eqn, (operand,)) for operand in operands]


def axis_index(frame: Frame, eqn: Any, operands: list[Any]) -> list[Any]:
    """The replica's id varies; an index along another axis does not."""
    varies = frame.analysis.mentions_replicas(eqn)
    return for_all(eqn, varying_since(eqn) if varies else None)


def summing(frame: Frame, eqn: Any, operands: list[Any]) -> list[Any]:
    """A sum over the replicas."""
    return _collective(frame, eqn, operands, _summed_before(frame, eqn, operands))


def reducing(frame: Frame, eqn: Any, operands: list[Any]) -> list[Any]:
    """The smallest or largest over the replicas: again, it changes nothing."""
    return _collective(frame, eqn, operands, None)


def _summed_before(frame: Frame, eqn: Any, operands: list[Any]) -> State | None:
    """What `eqn` sums although it is reduced already, if it is not for a mean."""
    state = join(operands)
    if level_of(state) != Level.REDUCED or is_mean(frame, eqn):
        return None
    return state


def _collective(
    frame: Frame, eqn: Any, operands: list[Any], before: State | None
) -> list[Any]:
    """A reduction: its result is the same on all members of its group."""
    if not frame.analysis.mentions_replicas(eqn):
        return each(frame, eqn, operands)
    frame.collectives.append(Collective(Site((eqn,)), reduced_before=before))
    if eqn.params.get("axis_index_groups") is not None:
        return for_all(eqn, varying_since(eqn))  # equal inside a group only
    reduced = State(Level.REDUCED, None, Site((eqn,)), is_direct=True)
    return [None if operand is None else reduced for operand in operands]


def gathering(frame: Frame, eqn: Any, operands: list[Any]) -> list[Any]:
    """A collective after which all members of a group have the same."""
    if not frame.analysis.mentions_replicas(eqn):
        return each(frame, eqn, operands)
    frame.collectives.append(Collective(Site((eqn,))))
    in_groups = eqn.params.get("axis_index_groups") is not None
    return for_all(eqn, varying_since(eqn) if in_groups else SAME)


def scattering(frame: Frame, eqn: Any, operands: list[Any]) -> list[Any]:
    """A collective that gives each member another part."""
    if not frame.analysis.mentions_replicas(eqn):
        return each(frame, eqn, operands)
    before = None
    if eqn.primitive.name == "reduce_scatter":
        before = _summed_before(frame, eqn, operands)
    frame.collectives.append(Collective(Site((eqn,)), reduced_before=before))
    return for_all(eqn, varying_since(eqn))


def scaling(frame: Frame, eqn: Any, operands: list[Any]) -> list[Any]:
    """A product or quotient."""
    state = computed(eqn, operands)
    if level_of(state) == Level.REDUCED and is_share(frame, eqn):
        # Each replica's equal share, to be summed: it counts as reduced no more. But a
        # sum divided by the number of replicas is a mean.
        if not any(state is not None and state.is_direct for state in operands):
            return [not_reduced(state)]
    return [state]
