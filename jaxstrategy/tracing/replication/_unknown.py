"""Operations without a rule: what can be said of them, and what cannot."""

from __future__ import annotations

import dataclasses

from jax.ref import AbstractRef

from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing.replication._analysis import Frame
from jaxstrategy.tracing.replication._jaxprs import inner_jaxprs
from jaxstrategy.tracing.replication._levels import (
    Collective,
    HeldState,
    Known,
    Replication,
    computed,
    for_all,
    join,
    varying_since,
)
from jaxstrategy.tracing.replication._site import Site


def pure(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """An operation that computes from its operands and does nothing else."""
    return for_all(eqn, computed(eqn, operands))


def outside(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """An operation whose results differ between replicas whatever it is given."""
    return _varying(frame, eqn, operands, _hidden_collectives(frame, eqn, operands))


def other(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """An operation that JAX lowers to something; what that is decides."""
    if frame.analysis.mentions_replicas(eqn):
        return _varying(frame, eqn, operands, [Collective(Site((eqn,)))])
    lowered = frame.analysis.lowered(eqn)
    if lowered.is_pure:
        return pure(frame, eqn, operands)
    collectives = _hidden_collectives(frame, eqn, operands)
    if not collectives and lowered.communicates:
        collectives = [Collective(Site((eqn,)))]
    if lowered.decides:
        collectives = _decided_inside(collectives, eqn, operands)
    return _varying(frame, eqn, operands, collectives)


def _varying(
    frame: Frame, eqn: Equation, operands: list[Known], collectives: list[Collective]
) -> list[Known]:
    frame.collectives += collectives
    state = varying_since(eqn)
    for cell in operands:
        if isinstance(cell, HeldState):  # it may write there
            frame.write(cell, state)
    return for_all(eqn, state)


def _hidden_collectives(
    frame: Frame, eqn: Equation, operands: list[Known]
) -> list[Collective]:
    """The collectives in the jaxprs of `eqn`, however it calls them."""
    given = join(operands)
    found: list[Collective] = []
    for jaxpr in inner_jaxprs(eqn.params):
        inputs = [
            HeldState(given) if isinstance(var.aval, AbstractRef) else given
            for var in jaxpr.invars
        ]
        found += frame.enter(jaxpr, inputs, eqn)[1]
    return found


def _decided_inside(
    collectives: list[Collective], eqn: Equation, operands: list[Known]
) -> list[Collective]:
    """The `collectives`, which something inside `eqn` may leave out."""
    decider = join(operands)
    if decider is None or not decider.varies:
        return collectives
    return [decided(found, computed(eqn, (decider,)), eqn) for found in collectives]


def decided(
    found: Collective, decider: Replication | None, eqn: Equation
) -> Collective:
    """`found`, where `decider` decides at `eqn` unless something further in does."""
    if found.decided_by is not None:
        return found
    return dataclasses.replace(found, decided_by=decider, decided_at=Site((eqn,)))
