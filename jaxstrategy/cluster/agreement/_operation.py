"""Operations that all processes do together, and the difference between two."""

from __future__ import annotations

import dataclasses
import itertools
import traceback
import zlib
from collections.abc import Sequence
from typing import TypedDict, final

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxstrategy.cluster.connections._fields import Json
from jaxstrategy.text import _user_code
from jaxstrategy.text._array_types import Shaped, array_type
from jaxstrategy.text._lists import and_more

_HASHED_BYTES = 65536  # of an argument that comes from the host
_NAMED = 3  # captured values of a program; the others are counted


class ProgramPrint(TypedDict):
    """A program of a step, as its process tells the others of it.

    Attributes:
      name: of the step.
      prints: of its code, and of each value that it has captured.
      captured: these values in words.
    """

    name: str
    prints: list[str]
    captured: list[str]


@final
@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that a process is about to do with all others.

    Attributes:
      name: what is done.
      where: its source line, which is only shown.
      kinds: dtypes and shapes of what it is done with.
      programs: those that must be the same in all processes.
    """

    name: str
    where: str
    kinds: Sequence[str] = ()
    programs: Sequence[ProgramPrint] = ()

    def told(self) -> list[Json]:
        """The operation as JSON, of which `Operation(*told)` makes it again."""
        return [self.name, self.where, list(self.kinds), list(self.programs)]

    @property
    def prints(self) -> list[tuple[str, list[str]]]:
        """Names and fingerprints of its programs."""
        return [(program["name"], program["prints"]) for program in self.programs]


def other_programs(first: Operation, other: Operation, index: int) -> str | None:
    """Describe how the programs of two processes differ; None if they do not.

    Args:
      first: what process 0 is about to do.
      other: what the other one is about to do.
      index: of the other one.
    """
    if first.prints == other.prints:
        return None
    pairs = itertools.zip_longest(first.programs, other.programs)
    one, two = next(pair for pair in pairs if _differ(*pair))
    name = (one or two)["name"]
    return (
        f"Processes 0 and {index} have made different programs of `{name}`, and were "
        f"about to run them together. {_what_differs(one, two)}\nA number or an array "
        "that a step captures is part of its program, and must be the same in all "
        "processes, as must be an argument that is no PerReplica. Pass it as an "
        "argument, as a PerReplica if it is to differ."
    )


def other_operation(first: Operation, other: Operation, index: int) -> str | None:
    """Describe how the operations of two processes differ; None if they do not.

    Args:
      first: what process 0 is about to do.
      other: what the other one is about to do.
      index: of the other one.
    """
    if first.name != other.name:
        return (
            f"  process 0: `{first.name}` ({first.where})\n"
            f"  process {index}: `{other.name}` ({other.where})"
        )
    if len(first.kinds) != len(other.kinds):
        return (
            f"  process 0: `{first.name}` ({first.where}) with {len(first.kinds)} "
            f"arrays\n  process {index}: the same with {len(other.kinds)}"
        )
    pairs = zip(first.kinds, other.kinds, strict=True)
    for place, (one, two) in enumerate(pairs):
        if one != two:
            return (
                f"  process 0: `{first.name}` ({first.where}), array {place} of its "
                f"arguments: {one}\n  process {index}: {two}"
            )
    return None


def _differ(one: ProgramPrint | None, two: ProgramPrint | None) -> bool:
    if one is None or two is None:
        return True
    return (one["name"], one["prints"]) != (two["name"], two["prints"])


def _what_differs(one: ProgramPrint | None, two: ProgramPrint | None) -> str:
    if one is None or two is None or one["name"] != two["name"]:
        return "One of them has made none."
    prints = list(zip(one["prints"], two["prints"], strict=False))
    if prints[0][0] != prints[0][1] or len(one["prints"]) != len(two["prints"]):
        return "The code differs, or a number in it."
    captured = zip(one["captured"], prints[1:], strict=True)
    found = [text for text, (mine, other) in captured if mine != other]
    named = "\n".join(f"  {text}" for text in found[:_NAMED])
    more = and_more(len(found), _NAMED, before="\n  ")
    is_argument = any(", argument `" in text for text in found)
    what = "captures, or is given," if is_argument else "captures"
    return f"What it {what} differs:\n{named}{more}"


def users_line() -> str:
    """The line of the user's own code that is executed."""
    stack = traceback.walk_stack(None)
    frames = ((frame.f_code.co_filename, number) for frame, number in stack)
    return str(_user_code.innermost(frames) or "unknown line")


def kind(array: Shaped) -> str:
    """Dtype and shape."""
    return array_type(array.dtype, array.shape, ", ")


def described(leaf: ArrayLike) -> str:
    """The part of an argument of a step that must be the same in all processes."""
    if isinstance(leaf, jax.Array):
        return kind(leaf)
    if isinstance(leaf, (bool, int, float, complex)):
        return f"{type(leaf).__name__} {leaf!r}"
    array = np.asarray(leaf)
    if array.nbytes > _HASHED_BYTES:
        return kind(array)
    bits = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return f"{kind(array)} of bits {bits:08x}"
