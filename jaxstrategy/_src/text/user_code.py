"""Where in the user's own code something happened."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

import jax


def _folder(path: str) -> str:
    return os.path.abspath(path) + os.sep


# Frames of these packages are machinery: a user cannot change them.
_MACHINERY = (
    _folder(os.path.dirname(str(jax.__file__))),
    _folder(str(Path(__file__).parents[2])),
)
# Other people's code, which a user would rather not be sent to.
_LIBRARIES = tuple(
    _folder(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")
)


@dataclasses.dataclass(frozen=True, order=True)
class Line:
    """A line of source code; prints as `file:number: code`."""

    file: str
    number: int

    @property
    def code(self) -> str:
        """The text of the line, empty if the file cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    @property
    def name(self) -> str:
        """The name of the file; of a notebook's cell what the notebook calls it."""
        cell = _cell_name(self.file)
        return os.path.basename(self.file) if cell is None else cell

    def __str__(self) -> str:
        code = self.code
        cell = _cell_name(self.file)
        place = f"{self.file if cell is None else cell}:{self.number}"
        return f"{place}: {code}" if code else place


def _cell_name(file: str) -> str | None:
    """`In[3]`, if code of a notebook's cell stands in this file."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    named = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = None if named is None else named(file)
    return None if found is None else found[1]


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether code in `filename` was written by the user rather than by us or JAX."""
    inside = os.path.abspath(filename).startswith(_MACHINERY)
    return not inside and not filename.startswith("<frozen")


@functools.lru_cache(maxsize=4096)
def _is_librarys(filename: str) -> bool:
    if filename.startswith("<"):  # typed in; else generated, as a dataclass's methods
        return not filename.startswith(_TYPED_IN)
    path = os.path.abspath(filename)
    return path.startswith(_LIBRARIES) or any(name in path for name in _INSTALLED)


# Other places than Python's own: a user's, Debian's.
_INSTALLED = tuple(
    f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")
)
_TYPED_IN = ("<ipython", "<python-input", "<stdin", "<console", "<doctest")


def innermost(frames: Iterable[tuple[str, int]], libraries: bool = True) -> Line | None:
    """The first of `frames` that is the user's own code."""
    users = [frame for frame in frames if is_users(frame[0])]
    own = [frame for frame in users if not _is_librarys(frame[0])]
    best = own or (users if libraries else [])
    return Line(*best[0]) if best else None


def users_frame() -> FrameType | None:
    """The innermost frame of the user's code that led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def users_line(traceback: TracebackType | None) -> Line | None:
    """The innermost line of the user's code in an exception's traceback."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return innermost(reversed(frames))


def warn(message: str, category: type[Warning], line: Line | None = None) -> None:
    """Give a warning at `line`, or at the user's line that led here."""
    frame = users_frame()
    if line is None and frame is not None:
        line = Line(frame.f_code.co_filename, frame.f_lineno)
    if line is None:
        warnings.warn(message, category, stacklevel=2)
        return
    registry = {} if frame is None else frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        line.file,
        line.number,
        registry=registry.setdefault("__warningregistry__", {}),
    )
