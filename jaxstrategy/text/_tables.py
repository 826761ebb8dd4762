"""Small tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

_MOST_ROWS = 16


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence]) -> str:
    """An HTML table; of many rows the first and the last ones."""
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows = [*rows[:half], ["…"] * len(header), *rows[-half:]]
    head = "".join(f"<th>{html.escape(str(cell))}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
