"""What is read of parameter servers and what is changed: `Read`, `ServerOperation`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, final

import numpy as np

OF_WHOLE = ("set", "add", "subtract")
"""Operations with one operand of the variable's shape."""
OF_ROWS = tuple(
    f"scatter_{name}" for name in ("add", "sub", "mul", "div", "min", "max", "update")
)
"""Operations of some rows: operands are the rows' numbers and a value for each."""


class Read(NamedTuple):
    """A variable, or some rows of it.

    Attributes:
      variable: its number.
      rows: the numbers of the rows, an int32 or int64 vector; None: all of it.
    """

    variable: int
    rows: np.ndarray | None = None


class CallNumber(NamedTuple):
    """The run of a function to which a push belongs.

    Attributes:
      function: its number; what is pushed twice for one function counts once.
      finished: all functions before this number have ended and push nothing more, so
        that a server need not remember them.
      worker: the worker that runs it.
      incarnation: how often that worker was started before; what an earlier one pushes
        that was given up for lost does not count.
    """

    function: int
    finished: int = 0
    worker: int = -1
    incarnation: int = 0


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ServerOperation:
    """One change of a variable, which nobody sees half done.

    Attributes:
      name: one of `OF_WHOLE` or `OF_ROWS`; or "update", which calls a program.
      variables: the number of the variable. An update changes several together, which
        are on one server.
      operands: its arrays.
      program: of an update the key of the program, which takes what the variables hold
        and the operands, and returns what they hold afterwards.
    """

    name: str
    variables: tuple[int, ...]
    operands: tuple[np.ndarray, ...]
    program: str = ""
