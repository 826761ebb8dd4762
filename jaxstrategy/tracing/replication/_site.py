"""Where in a step an equation stands, and which line of the user's code made it.

JAX keeps the Python stack of every equation, up to the function that was traced: a
nested function, loop body or branch is traced by itself. So the line of an operation
inside a function of JAX's own is found in the stack of the equation that calls it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from jaxstrategy.text import _user_code
from jaxstrategy.text._user_code import Line
from jaxstrategy.tracing._jaxpr_types import Equation

_LOOPS = ("scan", "while")


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """An equation of a step.

    Attributes:
      eqns: the equation, and those that hold it: a call, a loop, a branch. The
        innermost is first.
    """

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
        _user_code.innermost(((f.file_name, f.line_num) for f in stack), libraries)
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
    if _user_code.is_users(frame.file_name):
        return None
    return frame.function_name.rpartition(".")[2]
