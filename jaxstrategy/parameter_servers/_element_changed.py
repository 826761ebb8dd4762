"""The signal that a worker's iterator gives elements of another type."""

from __future__ import annotations

from jaxstrategy.parameter_servers._shipped_program import ElementType


class ElementChanged(Exception):
    """The next element is of another type than the program was traced for.

    The worker keeps the element, so that nothing is lost: the function is traced again.

    Attributes:
      iterator: the number of the iterator among the program's.
      found: the type of the element.
    """

    def __init__(self, iterator: int, found: ElementType) -> None:
        super().__init__(iterator, found)
        self.iterator, self.found = iterator, found
