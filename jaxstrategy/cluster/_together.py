"""What all processes are about to do together, compared before any of them begins.

A program of several processes waits for all of them. One that is in another program
makes them wait for ever, or worse.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster import _processes
from jaxstrategy.cluster.board._board import AbstractBoard
from jaxstrategy.cluster.liveness._watchdog import Watchdog
from jaxstrategy.text import _user_code

_HASHED_BYTES = 65536  # of an argument that comes from the host
# The watchdog looks on, and the death of another process ends the wait.
_AS_LONG_AS_IT_TAKES = 1e6


def compare(
    board: AbstractBoard,
    name: str,
    where: str,
    kinds: Sequence[str],
    advice: str,
    made: Sequence[dict[str, Any]] = (),
    said: Any = None,
) -> list[Any]:
    """What each process said, by process, if all are about to do the same.

    Args:
      board: where they meet.
      name: what is done.
      where: its source line, which is only shown.
      kinds: what it is done with.
      advice: what should be the same in all processes.
      made: programs to be the same in all processes; of each its step's `name`, the
        `prints` of its code and of what it has captured, and the latter in words,
        `captured`.
      said: what JSON can hold; it may differ.

    Raises:
      ClusterError: another process is about to do something else, or has made another
        program of the same step.
    """
    # One key for all: a process that steps meets one that does something else.
    own = [said, list(made), where, name, *kinds]
    heard = board.gather("together", own, _AS_LONG_AS_IT_TAKES)
    each_said = [one for one, *_ in heard]
    heard = [rest for _, *rest in heard]
    for index, (programs, *_) in enumerate(heard):
        if _prints(programs) != _prints(heard[0][0]):
            raise common(board, _other_programs(heard[0][0], programs, index))
    heard = [rest for _, *rest in heard]
    for index, other in enumerate(heard):
        if other[1:] != heard[0][1:]:
            raise common(
                board,
                "The processes are about to do different things together:\n"
                f"{_difference(heard[0], other, index)}\n{advice}",
            )
    return each_said


def common(board: AbstractBoard, text: str) -> ClusterError:
    """An error that each process raises now."""
    board.common_error = text
    return ClusterError(text)


def agreed(watchdog: Watchdog, board: AbstractBoard, what: str, said: Any) -> list[Any]:
    """What each process said, by process, about something that all do outside of steps.

    Args:
      watchdog: looks on while they wait.
      board: where they meet.
      what: they do, in words.
      said: what JSON can hold.

    Raises:
      ClusterError: another process is about to do something else.
    """
    with watchdog.waiting(what):
        return compare(board, what, users_line(), (), _OPERATIONS, said=said)


_OPERATIONS = "All processes must do the same, in the same order."


@contextlib.contextmanager
def exchanging(what: str, *arrays: Any) -> Iterator[None]:
    """A block in which the processes exchange `arrays`, outside of steps.

    The values may differ, their shapes and dtypes may not.

    Raises:
      ClusterError: another process is about to do something else.
    """
    processes = _processes.current()
    if processes is None or processes.count == 1:
        yield
        return
    where = users_line()
    processes.watchdog.step_started(what, where)
    try:
        compare(processes.board, what, where, [kind(a) for a in arrays], _EXCHANGES)
        yield
    finally:
        processes.watchdog.step_dispatched()


_EXCHANGES = (
    "All processes must make, change and read together what they share, not only one "
    "of them (`if jax.process_index() == 0`): mirrored values, variables, reductions."
)


def users_line() -> str:
    """The line of the user's own code that is executed."""
    stack = traceback.walk_stack(None)
    frames = ((frame.f_code.co_filename, number) for frame, number in stack)
    return str(_user_code.innermost(frames) or "unknown line")


def kind(array: Any) -> str:
    """Dtype and shape."""
    return f"{array.dtype}{list(array.shape)}"


def described(leaf: Any) -> str:
    """What must be the same in all processes of an argument of a step."""
    if isinstance(leaf, jax.Array):
        return kind(leaf)
    if isinstance(leaf, (bool, int, float, complex)):
        return f"{type(leaf).__name__} {leaf!r}"
    array = np.asarray(leaf)
    if array.nbytes > _HASHED_BYTES:
        return kind(array)
    bits = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return f"{kind(array)} of bits {bits:08x}"


def _prints(programs: Sequence[dict[str, Any]]) -> list[Any]:
    return [(program["name"], program["prints"]) for program in programs]


def _other_programs(first: Any, other: Any, index: int) -> str:
    pairs = list(itertools.zip_longest(first, other))
    one, two = next(pair for pair in pairs if _differ(*pair))
    name = (one or two)["name"]
    return (
        f"Processes 0 and {index} have made different programs of `{name}`, and were "
        f"about to run them together. {_what_differs(one, two)}\nA number or an array "
        "that a step captures is part of its program, and must be the same in all "
        "processes, as must be an argument that is no PerReplica. Pass it as an "
        "argument, as a PerReplica if it is to differ."
    )


def _differ(one: Any, two: Any) -> bool:
    return one is None or two is None or _prints([one]) != _prints([two])


def _what_differs(one: Any, two: Any) -> str:
    if one is None or two is None or one["name"] != two["name"]:
        return "One of them has made none."
    prints = list(zip(one["prints"], two["prints"], strict=False))
    if prints[0][0] != prints[0][1] or len(one["prints"]) != len(two["prints"]):
        return "The code differs, or a number in it."
    captured = zip(one["captured"], prints[1:], strict=True)
    found = [text for text, (mine, other) in captured if mine != other]
    named = "\n".join(f"  {text}" for text in found[:3])
    more = f"\n  and {len(found) - 3} more" if len(found) > 3 else ""
    is_argument = any(", argument `" in text for text in found)
    what = "captures, or is given," if is_argument else "captures"
    return f"What it {what} differs:\n{named}{more}"


def _difference(first: list[str], other: list[str], index: int) -> str:
    if first[1] != other[1]:
        return (
            f"  process 0: `{first[1]}` ({first[0]})\n"
            f"  process {index}: `{other[1]}` ({other[0]})"
        )
    if len(first) != len(other):
        return (
            f"  process 0: `{first[1]}` ({first[0]}) with {len(first) - 2} arrays\n"
            f"  process {index}: the same with {len(other) - 2}"
        )
    pairs = enumerate(zip(first[2:], other[2:], strict=True))
    place = next(place for place, (one, two) in pairs if one != two)
    return (
        f"  process 0: `{first[1]}` ({first[0]}), array {place} of its arguments: "
        f"{first[2 + place]}\n"
        f"  process {index}: {other[2 + place]}"
    )
