"""Sentences in lines that fit."""

from __future__ import annotations

import textwrap

_WIDTH = 80


def lines_of(text: str) -> str:
    """Text in lines of at most 80 characters; all but the first are indented further.

    >>> print(lines_of("  a " + 30 * "word "))
      a word word word word word word word word word word word word word word word
        word word word word word word word word word word word word word word word
    """
    before = text[: len(text) - len(text.lstrip())]
    return textwrap.fill(
        text.strip(), _WIDTH, initial_indent=before, subsequent_indent=before + "  "
    )
