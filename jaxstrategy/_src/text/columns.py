"""Rows of text in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def in_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows as lines, moved in, with each column as wide as its longest cell.

    >>> list(in_columns([("a", "1"), ("long", "2")]))
    ['  a     1', '  long  2']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()
