"""Text for messages and reports: values as they are shown, HTML, the user's line."""

from __future__ import annotations

import dataclasses
import functools
import html
import importlib.util
import linecache
import operator
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Protocol, SupportsIndex, TypeAlias, cast

Cell: TypeAlias = str | int | float
"""A cell of a table. What is between backquotes is set as code."""

_CODE = re.compile(r"`([^`\n]+)`")
_MOST_ROWS = 16
# Notebooks align cells to the right and take style sheets out of what is not trusted.
_CELL = 'style="text-align:left;white-space:pre-wrap"'


def page(title: str, parts: Iterable[str]) -> str:
    return f"<div><p><b>{marked(title)}</b></p>{''.join(parts)}</div>"


def section(heading: str, *parts: str) -> str:
    return f"<p><b>{marked(heading)}</b></p>{''.join(parts)}"


def paragraph(text: str) -> str:
    return f"<p>{marked(text)}</p>"


def problem(text: str) -> str:
    return f"<pre>{marked(text)}</pre>"


def marked(text: str) -> str:
    """Text as HTML; what is between backquotes is set as code.

    >>> marked("`a < b` & c")
    '<code>a &lt; b</code> &amp; c'
    """
    return _CODE.sub(r"<code>\1</code>", html.escape(text))


def table(
    header: Sequence[str], rows: Iterable[Sequence[Cell]], most_rows: int | None = None
) -> str:
    """A table, without a header if its titles are empty."""
    shown = list(rows)
    if most_rows is not None and len(shown) > most_rows:
        half = most_rows // 2
        shown = [*shown[:half], ["…"] * len(header), *shown[-half:]]
    head = _row("th", header) if any(header) else ""
    return f"<table>{head}{''.join(_row('td', row) for row in shown)}</table>"


def rows_of(title: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A whole report that is one table; of many rows some are shown."""
    return page(title, [table(header, rows, most_rows=_MOST_ROWS)])


def _row(tag: str, cells: Sequence[Cell]) -> str:
    return "<tr>{}</tr>".format(
        "".join(f"<{tag} {_CELL}>{marked(str(cell))}</{tag}>" for cell in cells)
    )


_SHOWN = 200  # characters of a value in a message


def shown(value: object) -> str:
    """A value for a message: on one line, not long, whatever it is.

    Python writes no integer of more than 4,300 digits, and no deep nest.
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # anybody's `__repr__`; the message matters more
        kind = type(value).__name__
        if isinstance(value, int):
            sign = "a negative" if value < 0 else "an"
            return f"{sign} {kind} of {value.bit_length()} bits"
        return f"a {kind} that cannot be printed"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


if TYPE_CHECKING:
    import numpy as np  # the launcher imports this folder, and needs no NumPy


class Shaped(Protocol):
    """An array, or what stands for one, such as a variable."""

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def array_type(dtype: object, shape: Iterable[object], comma: str = ",") -> str:
    """Dtype and shape, as JAX prints them: `float32[3,2]`."""
    return f"{dtype}[{comma.join(map(str, shape))}]"


def listed(items: Sequence[object], most: int, quote: str = "") -> str:
    """The first `most` items, and how many more there are: `0, 1, 2 and 2 more`."""
    named = ", ".join(f"{quote}{item}{quote}" for item in items[:most])
    return f"{named}{and_more(len(items), most)}"


def and_more(count: int, shown: int, before: str = " ") -> str:
    """What follows the first `shown` of `count` items; empty if that is all of them."""
    return f"{before}and {count - shown} more" if count > shown else ""


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, moved in, with each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {'  '.join(map(str.ljust, row, widths))}".rstrip() for row in rows]


def first_few(items: Iterable[object], most: int) -> str:
    """The first `most` items, and dots if there are more: `0, 1, 2, ...`."""
    known = list(items)
    return ", ".join(map(str, known[:most])) + (", ..." if len(known) > most else "")


def whole(given: object) -> int | None:
    """`given` as an int, None unless it is a whole number; a bool is none.

    NumPy's integers are whole numbers, and so are JAX's whose value is known.

    >>> whole(3), whole(np.int64(3)), whole(3.0), whole(True), whole("3")
    (3, 3, None, None, None)
    """
    if isinstance(given, bool):
        return None
    try:
        return operator.index(cast(SupportsIndex, given))
    except TypeError:
        return None


def several_whole(given: object) -> tuple[int, ...] | None:
    """The whole numbers that `given` holds, None if it holds anything else."""
    try:
        found = [whole(entry) for entry in cast(Iterable[object], given)]
    except TypeError:
        return None
    return None if None in found else tuple(cast(list[int], found))


def positive(name: str, given: object) -> int:
    """`given`, which is a whole number from 1 on."""
    return at_least(1, name, given)


def at_least(least: int, name: str, given: object) -> int:
    """`given`, an argument that is a whole number from `least` on."""
    number = whole(given)
    if number is None:
        raise TypeError(f"`{name}` was {shown(given)}; a whole number was wanted.")
    if number < least:
        raise ValueError(f"`{name}` was {number}; {least} or more was wanted.")
    return number


_SI = ("", "k", "M", "G", "T", "P", "E")


def with_bytes(nbytes: float) -> str:
    """A number of bytes, in powers of 1024.

    >>> with_bytes(640), with_bytes(5 * 1024**2)
    ('640 B', '5 MiB')
    """
    power = 0
    while nbytes >= 1000 and power + 1 < len(_SI):
        nbytes, power = nbytes / 1024, power + 1
    unit = f"{_SI[power].upper()}iB" if power else "B"
    return f"{nbytes:.3g} {unit}"


def bytes_of(size: object) -> int:
    """The bytes of a device, given as a number or a text such as `"16GiB"`."""
    found, text = whole(size), size if isinstance(size, str) else ""
    pattern = r" *(\d{0,15}\.?\d{1,15}) *([KMGT]?)(i?)B? *"
    if (match := re.fullmatch(pattern, text, re.IGNORECASE)) is not None:
        power = " KMGT".index(match[2].upper() or " ")
        found = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if found is None or found < 1:
        raise (ValueError if isinstance(size, int | str) else TypeError)(
            f"`memory` was {shown(size)}; the bytes of one device were wanted, as a "
            'whole number or a text such as "16GiB".'
        )
    return found


def with_seconds(seconds: float) -> str:
    """A time.

    >>> with_seconds(0.00125), with_seconds(2.5), with_seconds(5400)
    ('1.25 ms', '2.5 s', '1.5 h')
    """
    if seconds >= 999.5:
        hours = seconds / 3600
        return f"{hours:.3g} h" if hours >= 1 else f"{seconds / 60:.3g} min"
    for unit in ("s", "ms", "us"):
        if seconds >= 0.9995:
            return f"{seconds:.3g} {unit}"
        seconds *= 1000
    return f"{seconds:.3g} ns"


def with_prefix(number: float) -> str:
    """A large number, in powers of 1000: `1.25 M`."""
    power = 0
    while number >= 999.5 and power + 1 < len(_SI):
        number, power = number / 1000, power + 1
    return f"{number:.3g} {_SI[power]}".rstrip()


def with_noun(count: int, noun: str) -> str:
    """A number of things: `1 replica`, `8 replicas`, `0 batches`."""
    return f"{count} {plural(count, noun)}"


def plural(count: int, noun: str) -> str:
    """`noun` as it follows a number of things."""
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return noun if count == 1 else f"{noun}{ending}"


def _folder(path: str) -> str:
    return os.path.abspath(path) + os.sep


# Frames of these packages are machinery: a user cannot change them.
_JAX = importlib.util.find_spec("jax")  # not imported: the launcher needs no JAX
_MACHINERY = tuple(
    _folder(os.path.dirname(str(file)))
    for file in (_JAX and _JAX.origin, Path(__file__).parent)
    if file is not None
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
