"""Shows links to files beside this folder, such as `../README.md`, as their words.

They lead somewhere in a checkout; the site has no such pages.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

OUTER = re.compile(r"\[([^\[\]]+)\]\(\.\./[^()\s]+\)")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", show_words)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def show_words(app: Sphinx, page: str, source: list[str]) -> None:
    """Change the text of a page before it is parsed."""
    source[0] = without_outer_links(source[0])


def without_outer_links(text: str) -> str:
    """The same text without links that leave the folder.

    >>> without_outer_links("See [them](../a/b.md#c) and [data](data.ipynb).")
    'See them and [data](data.ipynb).'
    """
    return OUTER.sub(r"\1", text)
