"""Makes of our docstrings what reStructuredText means by them.

They have Markdown's backquotes and fences: an indented block after a line that ends in
a colon is code, a list needs no empty line before it, and letters may follow a
backquote.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

# Sections of Google's style; what is indented below them is no code.
SECTION = re.compile(
    r"\s*(Args|Attributes|Returns|Yields|Raises|Warns|Examples?|Notes?):"
)


def setup(app: Sphinx) -> dict[str, bool]:
    # Before napoleon, which has the priority 500.
    app.connect("autodoc-process-docstring", translate, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def translate(app, what, name, obj, options, lines: list[str]) -> None:
    """Write the docstring's lines anew, as autodoc's event wants it."""
    lines[:] = as_rst(lines)
    if what == "property":
        # Napoleon takes what stands before a colon in the first line for a type, and
        # sees no sections; after an empty comment it leaves the rest as it is.
        text = GoogleDocstring(lines, app.config, app, "method", name, obj, options)
        lines[:] = ["..", "", *str(text).splitlines()]


def as_rst(lines: list[str]) -> list[str]:
    """The same docstring in reStructuredText.

    >>> as_rst(["All `x`s:", "", "    x + 1"])
    ['All `x`\\\\ s::', '', '    x + 1']
    >>> as_rst(["```", "a  b", "```"])
    ['::', '', '    a  b', '']
    >>> as_rst(["One of", "- this", "  and that", "- or this"])
    ['One of', '', '- this', '  and that', '- or this']
    """
    out: list[str] = []
    fenced = in_code = False
    for index, line in enumerate(lines):
        if line.strip() == "```":
            out += [""] if fenced else [line.replace("```", "::"), ""]
            fenced = not fenced
        elif fenced:
            out.append("    " + line)
        else:
            if _begins_list(lines, index):
                out.append("")
            line = line + ":" if _is_before_code(lines, index) else line
            if line.strip() and not _is_doctest(line):
                line, in_code = _with_ends(line, in_code)
            else:
                in_code = False
            out.append(line)
    return out


def _with_ends(line: str, in_code: bool) -> tuple[str, bool]:
    """The line with a mark where a word goes on after code; whether code goes on."""
    parts = line.split("`")
    out = parts[0]
    for part in parts[1:]:
        ends = in_code and re.match(r"\w", part)
        out += "`" + ("\\ " if ends else "") + part
        in_code = not in_code
    return out, in_code


def _is_before_code(lines: list[str], index: int) -> bool:
    line, rest = lines[index], lines[index + 1 : index + 3]
    if len(rest) < 2 or rest[0].strip() or not line.endswith(":"):
        return False
    is_code = not rest[1].lstrip().startswith((">>>", "- ", "* "))
    return _indent(rest[1]) > _indent(line) and is_code and not SECTION.fullmatch(line)


def _begins_list(lines: list[str], index: int) -> bool:
    """Whether a list begins right after other text."""
    line = lines[index]
    if not line.lstrip().startswith("- ") or not index or not lines[index - 1].strip():
        return False
    before = [each for each in lines[:index] if _indent(each) <= _indent(line)]
    return not before or not before[-1].lstrip().startswith("- ")


def _is_doctest(line: str) -> bool:
    return line.lstrip().startswith((">>>", "..."))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else -1
