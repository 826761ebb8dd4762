"""The knowledge of the analysis about one value, and about a whole jaxpr."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing.replication._site import Site


class Level(enum.IntEnum):
    """A degree of knowledge; a result has the highest level of its operands."""

    SAME = 1
    REDUCED = 2
    VARYING = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Replication:
    """The knowledge about one value; None stands for a constant.

    Attributes:
      level: see `Level`.
      input: the input of the jaxpr where the level comes from, if it is not from an
        equation inside.
      site: that equation; or where the input was first used, None if it was not yet.
      is_direct: whether this is an unchanged result of the reduction at `site`.
      classes: of a varying value, for each replica a number; replicas of one number
        hold the same. None: nothing is known.
      part: what is reduced of a varying value that was joined just now.
    """

    level: Level
    input: int | None = None
    site: Site | None = None
    is_direct: bool = False
    classes: tuple[int, ...] | None = None
    part: Replication | None = None

    @property
    def varies(self) -> bool:
        """Whether it may differ between replicas."""
        return self.level is Level.VARYING


SAME = Replication(Level.SAME)


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A collective over the replicas, or part of them.

    Attributes:
      site: its equation.
      decided_by: the varying value that decides whether a replica gets there, if any.
      decided_at: the branch or loop where that value decides.
      reduced_before: what it sums, where that is the result of a reduction already.
      is_merge: it is no collective, but the first equation of a `merge_call`; these
        are noted only where they are `decided_by` something.
      groups: the replicas that wait for each other; None: all of them.
    """

    site: Site
    decided_by: Replication | None = None
    decided_at: Site | None = None
    reduced_before: Replication | None = None
    is_merge: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None

    def is_whole(self, decider: Replication) -> bool:
        """Whether those that wait for each other see the same of `decider`."""
        if self.groups is None or decider.classes is None:
            return False
        held = decider.classes
        return all(len({held[member] for member in each}) == 1 for each in self.groups)


@dataclasses.dataclass(frozen=True)
class SameReference:
    """An output that is the reference at `input`."""

    input: int


@dataclasses.dataclass(frozen=True)
class Findings:
    """The knowledge of the analysis about a jaxpr.

    Attributes:
      outputs: for each output; of a step a `Replication`, or None of a constant.
      collectives: in program order.
      contents: for each input that is a reference and may be written to, what it holds
        in the end.
      overwritten: those of them that keep nothing of what they held before.
    """

    outputs: list[Any]
    collectives: list[Collective]
    contents: dict[int, Replication | None]
    overwritten: frozenset[int] = frozenset()

    def of_one_replica(self) -> Findings:
        """The same where nothing can differ, and a sum over the replicas is harmless.

        Arrays of a batch are equal on all replicas there, so that nothing tells what
        was computed from them from what was reduced.
        """
        alone = [
            Collective(found.site) for found in self.collectives if not found.is_merge
        ]
        contents = {index: _alone(state) for index, state in self.contents.items()}
        return Findings([_alone(state) for state in self.outputs], alone, contents)


def _alone(state: Replication | None) -> Replication | None:
    return SAME if level_of(state) == Level.VARYING else state


class HeldState:
    """The contents of a mutable reference. One object however many names it has.

    Attributes:
      content: what is known of it.
      is_written: whether something may have been written to it.
      is_overwritten: whether all of it was, whatever happened.
    """

    def __init__(self, content: Replication | None) -> None:
        self.content = content
        self.is_written = False
        self.is_overwritten = False


# What is known of a value, or of what a reference holds; None of a constant.
Known: TypeAlias = Replication | HeldState | None


def content_of(state: Known) -> Replication | None:
    """`state` itself, or what the reference holds."""
    return state.content if isinstance(state, HeldState) else state


def level_of(state: Known) -> int:
    """The level of a state, 0 of a constant."""
    state = content_of(state)
    return 0 if state is None else state.level


def join(states: Iterable[Known]) -> Replication | None:
    """The first state of the highest level; a reference counts as what it holds."""
    best, highest = None, 0
    for known in states:
        state = known.content if isinstance(known, HeldState) else known
        if state is None:
            continue
        if state.level > highest:
            best, highest = state, state.level
        elif best is not None and best.classes and state.level == highest:
            best = dataclasses.replace(best, classes=_common(best, state))
    return best


def _common(one: Replication, other: Replication) -> tuple[int, ...] | None:
    """The classes of replicas that agree on both values."""
    if one.classes is None or other.classes is None:
        return None
    return numbered(list(zip(one.classes, other.classes, strict=True)))


def numbered(kinds: Sequence[Hashable]) -> tuple[int, ...] | None:
    """Classes of equal `kinds`; None if no two are equal."""
    numbers: dict[Hashable, int] = {}
    classes = tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds)
    return classes if len(numbers) < len(kinds) else None


def computed(eqn: Equation, operands: Iterable[Known]) -> Replication | None:
    """The knowledge about something that `eqn` computes from `operands`."""
    state = join(operands)
    if state is None or state is SAME:
        return state
    if state.level is Level.REDUCED:
        return _reduced_and_used(eqn, state)
    if state.site is None:
        site = Site((eqn,))
        return Replication(state.level, state.input, site, classes=state.classes)
    if state.part is not None:
        return dataclasses.replace(state, part=None)
    return state


def _reduced_and_used(eqn: Equation, state: Replication) -> Replication:
    # A `Plan` sums 16 bits in float32 and converts back: that is still the sum itself.
    if eqn.primitive.name == "convert_element_type":
        return state
    if "transpose(" in str(eqn.source_info.name_stack):
        # Part of a gradient: its local share of what differentiation would sum.
        return SAME
    if state.site is None or state.is_direct:
        site = Site((eqn,)) if state.site is None else state.site
        return Replication(state.level, state.input, site)
    return state


def not_reduced(state: Replication | None) -> Replication | None:
    """`state`, but equal on all replicas for no special reason if it was reduced."""
    return SAME if state is not None and state.level is Level.REDUCED else state


def for_all(eqn: Equation, state: Known) -> list[Known]:
    """`state` for each result of `eqn`."""
    return [state] * len(eqn.outvars)


def varying_since(eqn: Equation) -> Replication:
    """The knowledge of a result that differs whatever `eqn` is given."""
    return Replication(Level.VARYING, None, Site((eqn,)))
