"""Where in a step an equation stands, and which line of the user's code made it.

JAX keeps the Python stack of every equation, up to the function that was traced: a
nested function, loop body or branch is traced by itself. So the line of an operation
inside a function of JAX's own is found in the stack of the equation that calls it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxstrategy import _source
from jaxstrategy._source import Line

_LOOPS = ("scan", "while")


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """An equation of a step.

    Attributes:
      eqns: the equation, and those that hold it: a call, a loop, a branch. The
        innermost is first.
    """

    eqns: tuple[Any, ...]

    def within(self, eqn: Any) -> Site:
        """The same site seen from outside `eqn`, which holds it."""
        return Site((*self.eqns, eqn))

    @property
    def primitive(self) -> str:
        """The name of the operation."""
        return self.eqns[0].primitive.name

    @property
    def loops(self) -> tuple[int | None, ...]:
        """How often each loop around it turns, the innermost first; None: unknown."""
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
        return any("transpose(" in str(eqn.source_info.name_stack) for eqn in self.eqns)

    @property
    def line(self) -> Line | None:
        """The user's line that made it, if JAX kept the stack."""
        stacks = [_frames(eqn) for eqn in self.eqns]
        lines = (
            _source.innermost(frames, libraries)
            for libraries in (False, True)
            for frames in stacks
        )
        return next(filter(None, lines), None)


def _frames(eqn: Any) -> list[tuple[str, int]]:
    """Files and line numbers of the stack of `eqn`, the innermost first."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return [(frame.file_name, frame.line_num) for frame in frames]
