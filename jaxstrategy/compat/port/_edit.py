"""Changes of a text, each of some bytes of it: `Edit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import final


@final
@dataclasses.dataclass(frozen=True, order=True)
class Edit:
    """Bytes of a text in UTF-8, and the text that replaces them."""

    start: int
    end: int
    text: str


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits, of which no two overlap."""
    data, parts, at = text.encode(), [], 0
    for edit in sorted(set(edits)):
        assert edit.start >= at, "edits overlap"
        parts += [data[at : edit.start], edit.text.encode()]
        at = edit.end
    return b"".join([*parts, data[at:]]).decode()
