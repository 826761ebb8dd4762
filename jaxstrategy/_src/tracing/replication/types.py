"""Replication types: what the analysis knows of a value, and where it came from."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from jaxstrategy._src import text
from jaxstrategy._src.text import Line
from jaxstrategy._src.tracing.jaxprs import Equation

_LOOPS = ("scan", "while")


# JAX keeps the Python stack of an equation up to the function that was traced. Inner
# functions are traced by themselves, so the user's line may only be in the stack of an
# equation around it.
@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """An equation of a step, with the equations around it, innermost first."""

    eqns: tuple[Equation, ...]

    def within(self, outer: Site) -> Site:
        """The same site, inside of another one."""
        return Site((*self.eqns, *outer.eqns))

    @property
    def primitive(self) -> str:
        return self.eqns[0].primitive.name

    @property
    def loops(self) -> tuple[int | None, ...]:
        """The iterations of each loop around it, innermost first; None: unknown."""
        return tuple(
            eqn.params["length"] if eqn.primitive.name == "scan" else None
            for eqn in self.eqns[1:]
            if eqn.primitive.name in _LOOPS
        )

    @property
    def in_branch(self) -> bool:
        return any(eqn.primitive.name == "cond" for eqn in self.eqns[1:])

    @property
    def is_transposed(self) -> bool:
        """Whether it is part of a backward pass."""
        # The name stack of a backward pass is `transpose(jvp())` (JAX 0.10 and 0.12).
        return any("transpose(" in str(eqn.source_info.name_stack) for eqn in self.eqns)

    @property
    def line(self) -> Line | None:
        """The user's line that made it, if JAX kept the stack."""
        return _line(list(map(_stack, self.eqns)))

    @property
    def merge_line(self) -> Line | None:
        """The user's line that called the `merge_call` around it."""
        stacks = map(_stack, self.eqns)
        return _line([_callers(stack, "merge_call") for stack in stacks])

    def called(self, *functions: str) -> str | None:
        """The outermost of these functions through which the user's line made it."""
        frames = (frame for eqn in self.eqns for frame in _stack(eqn))
        ours = itertools.takewhile(lambda frame: _function(frame) is not None, frames)
        names = [name for name in map(_function, ours) if name in functions]
        return names[-1] if names else None


def _line(stacks: list[Any]) -> Line | None:
    """The first line of the user's code, rather than of a library's, in `stacks`."""
    lines = (
        text.innermost(((f.file_name, f.line_num) for f in stack), libraries)
        for libraries in (False, True)
        for stack in stacks
    )
    return next(filter(None, lines), None)


def _stack(eqn: Equation) -> list[Any]:
    """The frames of the stack of `eqn`, the innermost first."""
    traceback = eqn.source_info.traceback
    return [] if traceback is None else list(traceback.frames)


def _callers(stack: list[Any], function: str) -> list[Any]:
    """The part of `stack` outside of our `function`, or all of it."""
    for index, frame in enumerate(stack):
        if _function(frame) == function:
            return stack[index + 1 :]
    return stack


def _function(frame: Any) -> str | None:
    """The name of the frame's function in JAX or our code; None in other code."""
    if text.is_users(frame.file_name):
        return None
    return frame.function_name.rpartition(".")[2]


class Level(enum.IntEnum):
    """Kinds of replication types; a result has the highest level of its operands."""

    SAME = 1  # equal on all replicas
    REDUCED = 2  # equal, as the result of a reduction over the replicas
    VARYING = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Replication:
    """The replication type of a value; None stands for a constant."""

    level: Level
    input: int | None = None  # from which it comes
    site: Site | None = None  # where it got its level
    is_direct: bool = False  # the very result of a reduction
    classes: tuple[int, ...] | None = None  # a number for each replica: equal, if equal
    part: Replication | None = None  # of a concatenation, what was reduced

    @property
    def varies(self) -> bool:
        return self.level is Level.VARYING


SAME = Replication(Level.SAME)


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A collective over all replicas or groups of them."""

    site: Site
    decided_by: Replication | None = None
    decided_at: Site | None = None
    reduced_before: Replication | None = None
    is_merge: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None

    def agrees_on(self, decider: Replication) -> bool:
        """Whether replicas that wait for each other have the same `decider`."""
        classes = decider.classes
        if self.groups is None or classes is None:
            return False
        return all(len({classes[i] for i in group}) == 1 for group in self.groups)

    def decided(self, decider: Replication | None, at: Site) -> Collective:
        """Marked as decided by `decider` at an equation, unless it is marked."""
        if self.decided_by is not None:
            return self
        return dataclasses.replace(self, decided_by=decider, decided_at=at)


@dataclasses.dataclass(frozen=True)
class Findings:
    """The result of analysing a jaxpr."""

    outputs: list[Any]
    collectives: list[Collective]
    contents: dict[int, Replication | None]  # of references, by input

    def of_one_replica(self) -> Findings:
        """The findings for one replica: nothing varies, and no sum is a mistake."""
        alone = [
            Collective(found.site) for found in self.collectives if not found.is_merge
        ]
        contents = {index: _alone(state) for index, state in self.contents.items()}
        return Findings([_alone(state) for state in self.outputs], alone, contents)


def _alone(state: Replication | None) -> Replication | None:
    return SAME if level_of(state) == Level.VARYING else state


class RefState:
    """The type of a reference's content; one object for all names of a reference."""

    def __init__(self, content: Replication | None) -> None:
        self.content = content
        self.is_written = False
        self.is_overwritten = False


# Of a value or reference; None of a constant.
State: TypeAlias = Replication | RefState | None


def content_of(state: State) -> Replication | None:
    """The type of a value, or of a reference's content."""
    return state.content if isinstance(state, RefState) else state


def level_of(state: State) -> int:
    """The level of a state, 0 of a constant."""
    state = content_of(state)
    return 0 if state is None else state.level


def join(states: Iterable[State]) -> Replication | None:
    """The first type of the highest level; a reference counts as its content."""
    best, highest = None, 0
    for known in states:
        state = known.content if isinstance(known, RefState) else known
        if state is None:
            continue
        if state.level > highest:
            best, highest = state, state.level
        elif best is not None and best.classes and state.level == highest:
            best = dataclasses.replace(best, classes=_common(best, state))
    return best


def _common(one: Replication, other: Replication) -> tuple[int, ...] | None:
    """Classes of replicas that agree on both values."""
    if one.classes is None or other.classes is None:
        return None
    return as_classes(list(zip(one.classes, other.classes, strict=True)))


def as_classes(kinds: Sequence[Hashable]) -> tuple[int, ...] | None:
    """Numbers for replicas that are equal for equal `kinds`; None if all differ."""
    numbers: dict[Hashable, int] = {}
    classes = tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds)
    return classes if len(numbers) < len(kinds) else None


def not_reduced(state: Replication | None) -> Replication | None:
    """`state` with level `SAME` instead of `REDUCED`."""
    return SAME if state is not None and state.level is Level.REDUCED else state


def for_each_result(eqn: Equation, state: State) -> list[State]:
    """The same type for each result of `eqn`."""
    return [state] * len(eqn.outvars)
