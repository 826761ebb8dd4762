"""An iterator that a worker looks ahead in: `PeekedIterator`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from jaxstrategy._errors import OutOfRangeError
from jaxstrategy.parameter_servers._element_changed import ElementChanged
from jaxstrategy.parameter_servers._element_leaves import leaves_of
from jaxstrategy.parameter_servers._shipped_program import (
    ElementType,
    Input,
    ShippedProgram,
)
from jaxstrategy.values._types import PyTree


class Positioned(NamedTuple):
    """An element of an iterator that can be resumed."""

    element: PyTree
    position: Any


class _Seen(NamedTuple):
    leaves: list[Any]
    type: ElementType
    position: Any


@final
class PeekedIterator:
    """An iterator of which some elements were looked at before they are taken."""

    def __init__(self, iterator: Iterator[PyTree]) -> None:
        self._iterator = iterator
        self._seen: deque[_Seen] = deque()
        self.tells_position = bool(getattr(iterator, "tells_position", False))
        self.position: Any = None

    def at(self, turn: int) -> tuple[list[Any], ElementType] | None:
        """The element so many turns from now; None after the end."""
        while len(self._seen) <= turn:
            try:
                element = next(self._iterator)
            except StopIteration:
                return None
            position = None
            if isinstance(element, Positioned):
                element, position = element
            self._seen.append(_Seen(*leaves_of(element), position))
        return self._seen[turn][:2]

    def take(self, turns: int) -> None:
        """Go on by so many elements, as far as there are some."""
        for _ in range(min(turns, len(self._seen))):
            self.position = self._seen.popleft().position

    def close(self) -> None:
        """Stop reading."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()


@final
class Elements:
    """The elements that one call takes of its iterators."""

    def __init__(
        self, iterators: Sequence[PeekedIterator], program: ShippedProgram
    ) -> None:
        self._iterators = iterators
        self._program = program
        optional = {(i.number, i.turn) for i in program.inputs if i.kind == "present"}
        self._found: dict[tuple[int, int], list[Any] | None] = {}
        for number in range(len(program.iterators)):
            for turn, leaves in enumerate(self._of(number)):
                if leaves is None and (number, turn) not in optional:
                    self.take()
                    raise _ended(program.name)
                self._found[number, turn] = leaves

    def _of(self, number: int) -> list[list[Any] | None]:
        """The leaves of each element of one iterator; None after its end."""
        wanted = self._program.iterators[number]
        found = [self._iterators[number].at(turn) for turn in range(len(wanted))]
        types = [
            each[1] if each is not None else last
            for each, last in zip(found, wanted, strict=True)
        ]
        if types != list(wanted):
            raise ElementChanged(number, types)
        return [None if each is None else each[0] for each in found]

    def leaf(self, given: Input) -> Any:
        """One leaf of an element, or whether the element is there."""
        leaves = self._found[given.number, given.turn]
        if given.kind == "present":
            return np.bool_(leaves is not None)
        if leaves is not None:
            return leaves[given.leaf]
        element = self._program.iterators[given.number][given.turn]
        shape, dtype = element.types[given.leaf]
        return np.zeros(shape, dtype)

    def take(self) -> None:
        """They are used up now."""
        for iterator, types in zip(
            self._iterators, self._program.iterators, strict=True
        ):
            iterator.take(len(types))

    def positions(self) -> list[np.ndarray]:
        """Where the iterators are that can be resumed: JSON, as bytes of an array."""
        pairs = zip(self._iterators, self._program.iterators, strict=True)
        return [
            np.frombuffer(json.dumps(each.position).encode(), np.uint8)
            for each, types in pairs
            if types and each.tells_position
        ]


def _ended(name: str) -> OutOfRangeError:
    return OutOfRangeError(
        f"`{name}` took an element of an iterator that has no more on its worker. "
        "Schedule as many functions as there are elements, repeat the dataset, or ask "
        "with `get_next_as_optional()`."
    )
