"""Lists in messages: the first items, and how many more there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def listed(items: Sequence[object], most: int, quote: str = "") -> str:
    """The first `most` items, and how many more there are.

    >>> listed([0, 1, 2, 3, 4], 3)
    '0, 1, 2 and 2 more'
    >>> listed(["kernel", "bias"], 3, quote="`")
    '`kernel`, `bias`'
    """
    named = ", ".join(f"{quote}{item}{quote}" for item in items[:most])
    return f"{named}{and_more(len(items), most)}"


def and_more(count: int, shown: int, before: str = " ") -> str:
    """What follows the first `shown` of `count` items; empty if that is all of them.

    >>> and_more(10, 8), and_more(8, 8)
    (' and 2 more', '')
    """
    return f"{before}and {count - shown} more" if count > shown else ""


def first_few(items: Iterable[object], most: int) -> str:
    """The first `most` items, and dots if there are more.

    >>> first_few(range(5), 3)
    '0, 1, 2, ...'
    """
    known = list(items)
    return ", ".join(map(str, known[:most])) + (", ..." if len(known) > most else "")
