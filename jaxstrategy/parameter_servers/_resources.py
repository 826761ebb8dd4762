"""What a worker was given to keep: datasets, iterators, variables. `Resources`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, final

import jax
import numpy as np

from jaxstrategy._errors import OutOfRangeError
from jaxstrategy.parameter_servers._abstract_worker import Builder
from jaxstrategy.parameter_servers._element_changed import ElementChanged
from jaxstrategy.parameter_servers._shipped_program import (
    ElementType,
    Input,
    ShippedProgram,
)
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Leaf, PyTree


def leaves_of(element: PyTree) -> tuple[list[np.ndarray | jax.Array], ElementType]:
    """The leaves of an element, and its type."""
    nodes, structure = jax.tree.flatten(
        element, is_leaf=lambda node: isinstance(node, PerReplica)
    )
    split = tuple(isinstance(node, PerReplica) for node in nodes)
    leaves = [_array(node) for node in nodes]
    types = tuple((tuple(x.shape), str(x.dtype)) for x in leaves)
    return leaves, ElementType(str(structure), types, split)


def _array(node: Leaf) -> np.ndarray | jax.Array:
    if isinstance(node, PerReplica):
        return _per_replica.contents(node)
    if isinstance(node, jax.Array):
        return node
    array = np.asarray(node)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


@final
class PeekedIterator:
    """An iterator of which some elements were looked at before they are taken."""

    def __init__(self, iterator: Iterator[PyTree]) -> None:
        self._iterator = iterator
        self._seen: deque[tuple[list[Any], ElementType]] = deque()

    def at(self, turn: int) -> tuple[list[Any], ElementType] | None:
        """The element so many turns from now; None after the end."""
        while len(self._seen) <= turn:
            try:
                element = next(self._iterator)
            except StopIteration:
                return None
            self._seen.append(leaves_of(element))
        return self._seen[turn]

    def take(self, turns: int) -> None:
        """Go on by so many elements, as far as there are some."""
        for _ in range(min(turns, len(self._seen))):
            self._seen.popleft()


@final
class Elements:
    """The elements that one call takes of its iterators.

    Args:
      iterators: of the call.
      program: of the call.

    Raises:
      OutOfRangeError: there is no more.
      ElementChanged: an element is of another type than the program's.
    """

    def __init__(
        self, iterators: Sequence[PeekedIterator], program: ShippedProgram
    ) -> None:
        self._iterators = iterators
        self._program = program
        optional = {(i.number, i.turn) for i in program.inputs if i.kind == "present"}
        self._found: dict[tuple[int, int], list[Any] | None] = {}
        for number, turns in enumerate(program.turns):
            for turn in range(turns):
                found = self._at(number, turn)
                if found is None and (number, turn) not in optional:
                    self.take()
                    raise OutOfRangeError(
                        f"`{program.name}` took an element of an iterator that has "
                        "no more on its worker. Schedule as many functions as there "
                        "are elements, repeat the dataset, or ask with "
                        "`get_next_as_optional()`."
                    )
                self._found[number, turn] = found

    def _at(self, number: int, turn: int) -> list[Any] | None:
        element = self._iterators[number].at(turn)
        if element is None:
            return None
        leaves, found = element
        if found != self._program.iterators[number]:
            raise ElementChanged(number, found)
        return leaves

    def leaf(self, given: Input) -> Any:
        """One leaf of an element, or whether the element is there."""
        leaves = self._found[given.number, given.turn]
        if given.kind == "present":
            return np.bool_(leaves is not None)
        if leaves is not None:
            return leaves[given.leaf]
        shape, dtype = self._program.iterators[given.number].types[given.leaf]
        return np.zeros(shape, dtype)

    def take(self) -> None:
        """They are used up now."""
        for iterator, turns in zip(self._iterators, self._program.turns, strict=True):
            iterator.take(turns)


@final
class Resources:
    """The resources of a worker, by their numbers.

    Args:
      index: of the worker.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._held: dict[int, Any] = {}

    def build(self, resource: int, builder: Builder, uses: Sequence[int]) -> None:
        """Make one; see `AbstractWorker.build`."""
        others = [self._held[number] for number in uses]
        self._held[resource] = builder(self._index, *others)

    def release(self, resources: Sequence[int]) -> None:
        """Forget some."""
        for number in resources:
            self._held.pop(number, None)

    def get(self, resource: int) -> Any:
        """One."""
        return self._held[resource]

    def set(self, resource: int, value: Any) -> None:
        """Put something in its place."""
        self._held[resource] = value

    def iterator(self, resource: int) -> PeekedIterator:
        """One that is an iterator."""
        held = self._held[resource]
        if not isinstance(held, PeekedIterator):
            held = self._held[resource] = PeekedIterator(iter(held))
        return held
