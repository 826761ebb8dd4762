"""Parts of reports as HTML: headings, paragraphs, tables, lists of problems.

Styles stand at the elements, because viewers of notebooks take style sheets and scripts
out of what they do not trust. Text and lines have the page's own colour, so that they
are seen on white and on dark pages.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from jaxstrategy.text._html_colours import Colour

Cell: TypeAlias = str | int | float
"""What stands in a table. Of a string, what is between backquotes is set as code, and
leading spaces say that it belongs to the row above."""

_CODE = re.compile(r"`([^`\n]+)`")
_NUMBER = re.compile(
    r"[-+~<>≤≥±]?\s?(\d[\d,]*\.?\d*|\.\d+)([eE][-+]?\d+)?"
    r"\s?(%|x|×|[num]?s|min|h|d|[kKMGTPE]?i?(B|FLOP)?(/s)?)"
)
_NOT_KNOWN = {"", "…", "-", "not known", "none"}
_INDENTATION = 2
_LONG = 30
_MOST_ROWS = 16
_LINE = "1px solid rgba(128,128,128,.35)"


def page(title: str, parts: Iterable[str]) -> str:
    """A whole report: what a `_repr_html_` returns.

    Args:
      title: text.
      parts: HTML.
    """
    style = "color:inherit;max-width:60em;line-height:1.4"
    heading = f'<p style="margin:0 0 .4em;font-size:1.15em"><b>{marked(title)}</b></p>'
    return f'<div class="jaxstrategy" style="{style}">{heading}{"".join(parts)}</div>'


def section(heading: str, *parts: str) -> str:
    """HTML under a heading, which is text."""
    style = "margin:1.1em 0 .3em"
    return f'<p style="{style}"><b>{marked(heading)}</b></p>{"".join(parts)}'


def paragraph(text: str) -> str:
    """A paragraph of text."""
    return f'<p style="margin:.3em 0">{marked(text)}</p>'


def problem(text: str) -> str:
    """Something that is wrong, with all lines of its text, set apart from the rest."""
    style = (
        f"margin:.4em 0;padding:.3em .8em;border-left:4px solid {Colour.PROBLEM.css};"
        "white-space:pre-wrap;overflow-wrap:anywhere"
    )
    return f'<div style="{style}">{marked(text)}</div>'


def marked(text: str) -> str:
    """Text as HTML; what is between backquotes is set as code.

    >>> marked("`a < b` & c")
    '<code>a &lt; b</code> &amp; c'
    """
    return _CODE.sub(r"<code>\1</code>", html.escape(text))


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    caption: str = "",
    most_rows: int | None = None,
) -> str:
    """A table; columns of numbers are aligned to the right.

    Args:
      header: titles of the columns; all empty, if there are none.
      rows: as many cells each.
      caption: above the table.
      most_rows: of more, the first and the last are shown.
    """
    some = _some(list(rows), len(header), most_rows)
    shown = [[str(cell) for cell in row] for row in some]
    aligned = [_alignment(column) for column in zip(*shown, strict=True)]
    aligned = aligned or ["left"] * len(header)
    head = f"<thead>{_row('th', header, aligned)}</thead>" if any(header) else ""
    body = "".join(_row("td", row, aligned) for row in shown)
    above = f'<caption style="{_CAPTION}">{marked(caption)}</caption>'
    # A table that is wider than a phone is scrolled, not the page.
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;'
        f'margin:.2em 0;width:auto">{above if caption else ""}{head}'
        f"<tbody>{body}</tbody></table></div>"
    )


def rows_of(title: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A whole report that is one table of replicas, or of workers.

    Args:
      title: text.
      header: as of `table`.
      rows: as of `table`; of many, some are shown.
    """
    return page(title, [table(header, rows, most_rows=_MOST_ROWS)])


_CAPTION = "caption-side:top;text-align:left;font-weight:bold;color:inherit"


def _some(
    rows: list[Sequence[Cell]], columns: int, most: int | None
) -> list[Sequence[Cell]]:
    if most is None or len(rows) <= most:
        return rows
    half = most // 2
    return [*rows[:half], ["…"] * columns, *rows[-half:]]


def _alignment(column: Sequence[str]) -> str:
    known = [cell for cell in column if cell.strip() not in _NOT_KNOWN]
    are_numbers = all(_NUMBER.fullmatch(cell.strip()) for cell in known)
    return "right" if known and are_numbers else "left"


def _row(tag: str, cells: Sequence[str], aligned: Sequence[str]) -> str:
    # Notebooks and sites colour every other row, also in the middle of a list.
    row = "".join(map(_cell, [tag] * len(cells), cells, aligned))
    return f'<tr style="background:none">{row}</tr>'


def _cell(tag: str, cell: str, aligned: str) -> str:
    below = (len(cell) - len(cell.lstrip(" "))) // _INDENTATION
    left = f".7em .15em {0.7 + below}em" if below else ".7em"
    wrap = "white-space:nowrap;" if aligned == "right" else ""
    if aligned == "left" and len(cell) > _LONG:
        wrap = "min-width:14em;"  # on a phone, too, where the table is scrolled
    style = (
        f"{wrap}text-align:{aligned};vertical-align:top;padding:.15em {left};"
        f"border:0;border-bottom:{_LINE}"
    )
    return f'<{tag} style="{style}">{marked(cell.strip())}</{tag}>'
