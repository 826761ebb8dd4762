"""Where in the user's own code something happened."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType, TracebackType

import jax

# Frames of these packages are machinery: a user cannot change them.
_MACHINERY = tuple(
    os.path.dirname(os.path.abspath(str(file))) + os.sep
    for file in (jax.__file__, __file__)
)


def is_users(filename: str) -> bool:
    """Whether code in `filename` was written by the user rather than by us or JAX."""
    inside = os.path.abspath(filename).startswith(_MACHINERY)
    return not inside and not filename.startswith("<frozen")


def users_frame() -> FrameType | None:
    """The innermost frame of the user's code that led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def users_line(traceback: TracebackType | None) -> str | None:
    """`file:line: code` of the innermost user frame of an exception's traceback."""
    found = None
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_users(filename):
            found = (filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    if found is None:
        return None
    filename, line = found
    code = linecache.getline(filename, line).strip()
    return f"{filename}:{line}: {code}" if code else f"{filename}:{line}"
