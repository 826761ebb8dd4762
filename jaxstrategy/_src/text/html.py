"""Reports as plain HTML for notebooks: headings, paragraphs and tables."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

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
