"""The signal that a worker's iterator gives elements of another type."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstrategy.parameter_servers._shipped_program import ElementType


class ElementChanged(Exception):
    """The next element is of another type than the program was traced for."""

    def __init__(self, iterator: int, found: Sequence[ElementType]) -> None:
        super().__init__(iterator, tuple(found))
        self.iterator, self.found = iterator, tuple(found)
