"""Collectives: what they make equal, and sums of what is reduced already."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxstrategy.tracing._jaxpr_types import Atom, Equation
from jaxstrategy.tracing.replication._analysis import Frame
from jaxstrategy.tracing.replication._collective_table import Effect, effect_of
from jaxstrategy.tracing.replication._levels import (
    SAME,
    Collective,
    Known,
    Level,
    Replication,
    computed,
    content_of,
    for_all,
    join,
    level_of,
    not_reduced,
    numbered,
    varying_since,
)
from jaxstrategy.tracing.replication._shares import (
    gathered,
    gathers_sums,
    is_mean,
    is_share,
)
from jaxstrategy.tracing.replication._site import Site


def each(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """Several operations at once, each of one operand."""
    if len(operands) != len(eqn.outvars):
        return for_all(eqn, computed(eqn, operands))
    return [computed(eqn, (operand,)) for operand in operands]


def axis_index(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """The replica's id varies; an index along another axis does not."""
    varies = frame.analysis.mentions_replicas(eqn)
    return for_all(eqn, varying_since(eqn) if varies else None)


def summing(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A sum over the replicas."""
    return _collective(frame, eqn, operands, _summed_before(frame, eqn, operands))


def reducing(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """The smallest or largest over the replicas: again, it changes nothing."""
    return _collective(frame, eqn, operands, None)


def _summed_before(
    frame: Frame, eqn: Equation, operands: list[Known]
) -> Replication | None:
    """The operand that `eqn` sums although it is reduced, if it is not for a mean."""
    state = join(operands)
    if state is not None and state.varies:
        state = state.part
    if level_of(state) != Level.REDUCED or is_mean(frame, eqn):
        return None
    return state


def _collective(
    frame: Frame, eqn: Equation, operands: list[Known], before: Replication | None
) -> list[Known]:
    """A reduction: its result is the same on all members of its group."""
    if not frame.analysis.mentions_replicas(eqn):
        return each(frame, eqn, operands)
    frame.collectives.append(_noted(eqn, before))
    if eqn.params.get("axis_index_groups") is not None:
        pairs = zip(eqn.invars, operands, strict=True)
        return [
            _grouped(
                frame, eqn, content_of(operand), Level.REDUCED, _is_exact(frame, atom)
            )
            for atom, operand in pairs
        ]
    reduced = Replication(Level.REDUCED, None, Site((eqn,)), is_direct=True)
    return [None if operand is None else reduced for operand in operands]


def _noted(eqn: Equation, before: Replication | None = None) -> Collective:
    groups = eqn.params.get("axis_index_groups")
    waiting = None if groups is None else tuple(map(tuple, groups))
    return Collective(Site((eqn,)), reduced_before=before, groups=waiting)


def gathering(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A collective after which all members of a group have the same."""
    if not frame.analysis.mentions_replicas(eqn):
        return each(frame, eqn, operands)
    frame.collectives.append(_noted(eqn))
    of_sums = gathers_sums(frame, eqn)
    whole = Replication(Level.REDUCED, None, Site((eqn,)), is_direct=True)
    if eqn.params.get("axis_index_groups") is not None:
        state = _grouped(frame, eqn, join(operands), Level.SAME)
        return [whole if of_sums and state is SAME else state]
    return for_all(eqn, whole if of_sums else SAME)


def folding(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A sum or an extreme along axes of an array, which may be those of replicas."""
    state = computed(eqn, operands)
    if state is SAME and (origin := gathered(frame, eqn)) is not None:
        if frame.analysis.mentions_replicas(origin):
            return [Replication(Level.REDUCED, None, Site((eqn,)), is_direct=True)]
    return [state]


def permuting(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A value sent on: each replica has that of another, or zeros if none sends."""
    if not frame.analysis.mentions_replicas(eqn):
        return each(frame, eqn, operands)
    sender = {target: source for source, target in eqn.params["perm"]}
    replicas = range(frame.analysis.replicas)
    if any(replica not in sender for replica in replicas):
        return scattering(frame, eqn, operands)
    frame.collectives.append(_noted(eqn))
    return [
        _sent(eqn, content_of(operand), [sender[r] for r in replicas])
        for operand in operands
    ]


def _sent(
    eqn: Equation, operand: Replication | None, senders: list[int]
) -> Replication | None:
    """The knowledge of `operand` when each replica has that of its sender."""
    state = computed(eqn, (operand,))
    if state is None or not state.varies:
        return state
    classes = operand.classes if operand is not None else None
    if classes is None:
        return varying_since(eqn)
    sent = numbered([classes[sender] for sender in senders])
    return dataclasses.replace(varying_since(eqn), classes=sent)


def _is_exact(frame: Frame, atom: Atom) -> bool:
    """Whether a sum of such numbers is the same in whatever order they are added.

    XLA adds on CPUs in the order of the replicas. On accelerators the order follows
    the links between the devices of a group; that of two numbers makes no difference.
    """
    return frame.analysis.is_on_cpu or not jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _grouped(
    frame: Frame,
    eqn: Equation,
    operand: Replication | None,
    level: Level,
    is_exact: bool = True,
) -> Replication:
    """The result of each group, made of its members' values.

    Two groups have the same result if their members, in order, have the same values:
    so a sum inside groups, and then one across them, is the same everywhere.
    """
    groups = [tuple(group) for group in eqn.params["axis_index_groups"]]
    replicas = range(frame.analysis.replicas)
    is_sum = level is Level.REDUCED
    if operand is not None and operand.varies:
        held = operand.classes or tuple(replicas)
    elif is_sum and len(groups) > 1:
        # The same in groups of one size. But who reduces in groups means to differ.
        held = tuple(replicas)
    else:
        held = (0,) * len(replicas)
    results = []
    for replica in replicas:
        group = _group_of(replica, groups)
        is_alike = is_exact or len(group) < 3
        results.append((None if is_alike else group, *(held[each] for each in group)))
    if len(set(results)) == 1:
        return (
            Replication(level, None, Site((eqn,)), is_direct=True) if is_sum else SAME
        )
    return dataclasses.replace(varying_since(eqn), classes=numbered(results))


def _group_of(replica: int, groups: list[tuple[int, ...]]) -> tuple[int, ...]:
    return next(group for group in groups if replica in group)


def joining(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """Arrays joined into one."""
    state = computed(eqn, operands)
    if level_of(state) == Level.VARYING:
        reduced = list(filter(None, map(_reduced_of, operands)))
        if reduced and state is not None:
            state = dataclasses.replace(state, part=reduced[0])
    return [state]


def _reduced_of(operand: Known) -> Replication | None:
    """What of an operand is reduced: all of it, or a part that was joined before."""
    state = content_of(operand)
    if state is None or state.level is Level.REDUCED:
        return state
    return state.part


def reshaping(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """The same elements in another shape."""
    state, before = computed(eqn, operands), content_of(operands[0])
    if before is not None and before.part is not None and state is not None:
        state = dataclasses.replace(state, part=before.part)
    return [state]


def scattering(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A collective that gives each member another part."""
    if not frame.analysis.mentions_replicas(eqn):
        return each(frame, eqn, operands)
    before = None
    if effect_of(eqn) is Effect.SUM_SCATTER:
        before = _summed_before(frame, eqn, operands)
    frame.collectives.append(_noted(eqn, before))
    # Also of the same on all: each has the parts at its own place, which differ.
    return for_all(eqn, varying_since(eqn))


def scaling(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A product or quotient."""
    state = computed(eqn, operands)
    if level_of(state) == Level.REDUCED and is_share(frame, eqn):
        # Each replica's equal share, to be summed: it counts as reduced no more. But a
        # sum divided by the number of replicas is a mean.
        if not any(isinstance(s, Replication) and s.is_direct for s in operands):
            return [not_reduced(state)]
    return [state]
