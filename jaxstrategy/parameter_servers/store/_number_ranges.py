"""A set of whole numbers that come nearly in order: `NumberRanges`."""

from __future__ import annotations

import bisect
from typing import final


@final
class NumberRanges:
    """Whole numbers, of which it keeps only where they begin and end to be there.

    >>> numbers = NumberRanges()
    >>> for number in (3, 5, 4, 9):
    ...     numbers.add(number)
    >>> 5 in numbers, 6 in numbers, len(numbers)
    (True, False, 2)
    """

    def __init__(self) -> None:
        self._borders: list[int] = []  # first, end, first, end, ...

    def __len__(self) -> int:
        """How many ranges there are."""
        return len(self._borders) // 2

    def __contains__(self, number: int) -> bool:
        return bisect.bisect_right(self._borders, number) % 2 == 1

    def add(self, number: int) -> None:
        """Have a number too."""
        if number in self:
            return
        borders = self._borders
        at = bisect.bisect_left(borders, number)
        # It goes on with the range before, with the one after it, with both or none.
        goes_on = at < len(borders) and borders[at] == number
        first = at + goes_on
        comes_before = first < len(borders) and borders[first] == number + 1
        borders[at : first + comes_before] = [
            *([] if goes_on else [number]),
            *([] if comes_before else [number + 1]),
        ]

    def drop_below(self, number: int) -> None:
        """Forget all that are smaller."""
        at = bisect.bisect_right(self._borders, number)
        self._borders[:at] = [number] if at % 2 else []
