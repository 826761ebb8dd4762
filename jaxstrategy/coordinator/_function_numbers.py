"""The numbers of scheduled functions, and up to which all have ended."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from typing import final

# Of all coordinators of this process: a server takes a number it knows for a repeat.
_numbers = itertools.count()


@final
class FunctionNumbers:
    """Numbers for the functions of one coordinator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The first one is found at once, which it is not in a dict that is often cut.
        self._open: OrderedDict[int, None] = OrderedDict()
        self._next = 0

    def begin(self) -> int:
        """The number of a new function."""
        with self._lock:
            number = next(_numbers)
            self._open[number] = None
            self._next = number + 1
        return number

    def end(self, number: int) -> None:
        """It pushes nothing any more."""
        with self._lock:
            self._open.pop(number, None)

    @property
    def finished(self) -> int:
        """All functions before this number have ended."""
        with self._lock:
            return next(iter(self._open), self._next)
