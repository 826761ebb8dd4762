"""Replication types: what the analysis knows of a value, and where it came from."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from jaxstrategy._src.text import user_code
from jaxstrategy._src.text.user_code import Line
from jaxstrategy._src.tracing.jaxprs.visit import Equation

_LOOPS = ("scan", "while")


# JAX keeps the Python stack of every equation, up to the function that was traced: a
# nested function, loop body or branch is traced by itself. So the line of an operation
# inside a function of JAX's own is found in the stack of the equation that calls it.
@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """An equation of a step."""

    eqns: tuple[Equation, ...]

    def within(self, eqn: Equation) -> Site:
        """The same site seen from outside `eqn`, which holds it."""
        return Site((*self.eqns, eqn))

    @property
    def primitive(self) -> str:
        """The name of the operation."""
        return self.eqns[0].primitive.name

    @property
    def loops(self) -> tuple[int | None, ...]:
        """The turns of each loop around it, the innermost first; None: unknown."""
        return tuple(
            eqn.params["length"] if eqn.primitive.name == "scan" else None
            for eqn in self.eqns[1:]
            if eqn.primitive.name in _LOOPS
        )

    @property
    def in_branch(self) -> bool:
        """Whether it is in one of several branches."""
        return any(eqn.primitive.name == "cond" for eqn in self.eqns[1:])

    @property
    def is_transposed(self) -> bool:
        """Whether differentiation made it, not the user."""
        # The name stack of a backward pass is `transpose(jvp())` (JAX 0.10 and 0.12).
        return any("transpose(" in str(eqn.source_info.name_stack) for eqn in self.eqns)

    @property
    def line(self) -> Line | None:
        """The user's line that made it, if JAX kept the stack."""
        return _line(list(map(_stack, self.eqns)))

    @property
    def merge_line(self) -> Line | None:
        """The user's line that called the `merge_call` it is part of."""
        stacks = map(_stack, self.eqns)
        return _line([_callers(stack, "merge_call") for stack in stacks])

    def called(self, *functions: str) -> str | None:
        """The one of these functions that the user's line called to make it.

        The outermost, if one calls another: an `all_reduce` is a `psum` inside.
        """
        frames = (frame for eqn in self.eqns for frame in _stack(eqn))
        ours = itertools.takewhile(lambda frame: _function(frame) is not None, frames)
        names = [name for name in map(_function, ours) if name in functions]
        return names[-1] if names else None


def _line(stacks: list[Any]) -> Line | None:
    """The first line of the user's code, rather than of a library's, in `stacks`."""
    lines = (
        user_code.innermost(((f.file_name, f.line_num) for f in stack), libraries)
        for libraries in (False, True)
        for stack in stacks
    )
    return next(filter(None, lines), None)


def _stack(eqn: Equation) -> list[Any]:
    """The frames of the stack of `eqn`, the innermost first."""
    traceback = eqn.source_info.traceback
    return [] if traceback is None else list(traceback.frames)


def _callers(stack: list[Any], function: str) -> list[Any]:
    """The part of `stack` outside the call of a `function` of ours, or all of it."""
    for index, frame in enumerate(stack):
        if _function(frame) == function:
            return stack[index + 1 :]
    return stack


def _function(frame: Any) -> str | None:
    """The name of JAX's or our function that `frame` is in, None in other code."""
    if user_code.is_users(frame.file_name):
        return None
    return frame.function_name.rpartition(".")[2]


class Level(enum.IntEnum):
    """A degree of knowledge; a result has the highest level of its operands."""

    SAME = 1
    REDUCED = 2
    VARYING = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Replication:
    """The knowledge about one value; None stands for a constant."""

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
    """A collective over the replicas, or part of them."""

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
    """The knowledge of the analysis about a jaxpr."""

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
    """The contents of a mutable reference. One object however many names it has."""

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


def decided(
    found: Collective, decider: Replication | None, eqn: Equation
) -> Collective:
    """`found`, where `decider` decides at `eqn` unless something further in does."""
    if found.decided_by is not None:
        return found
    return dataclasses.replace(found, decided_by=decider, decided_at=Site((eqn,)))
