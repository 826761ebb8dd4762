"""A dict that forgets what was not used for long: `RecentlyUsed`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar, final

_Value = TypeVar("_Value")

PROGRAMS = 256
"""How many programs a worker keeps: a function that is defined anew in a loop would
otherwise fill its memory. Who sends programs counts in the same way, so that a program
is sent again that the worker has forgotten."""


@final
class RecentlyUsed(Generic[_Value]):
    """The values that were put or used last, by their keys."""

    def __init__(self, limit: int = PROGRAMS) -> None:
        self._limit = limit
        self._held: OrderedDict[str, _Value] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def put(self, key: str, value: _Value) -> None:
        """Keep a value, and forget the one that was not used for longest."""
        self._held[key] = value
        self._held.move_to_end(key)
        if len(self._held) > self._limit:
            self._held.popitem(last=False)

    def use(self, key: str) -> _Value:
        """A value that is there."""
        self._held.move_to_end(key)
        return self._held[key]
