"""Calls below which Python finds room for its frames: `with_room`.

CPython keeps frames in blocks of 16 KiB (3.11 to 3.13), and gives a block back as soon
as its last frame returns. If a step is called where a block is almost full, each call
of some function that JAX calls for every operation asks the system for a new block. The
same step is traced in 265 ms or in 420 ms, by how deep the stack is where it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

# A frame of this many values, 128 KiB, is given a block of twice its size.
_VALUES = 2**14


def with_room(
    fn: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs
) -> _Result:
    """`fn(*args, **kwargs)`, which may call functions hundreds of frames deep.

    They all have their frames in one block.
    """
    return fn(*args, **kwargs)


with_room.__code__ = with_room.__code__.replace(co_stacksize=_VALUES)
