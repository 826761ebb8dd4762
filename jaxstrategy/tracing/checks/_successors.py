"""Results that take the place of an argument: the state that a loop goes on with.

Nothing says which results those are. A part of the results counts as the successor of a
part of the arguments if both are put together alike, of arrays of the same types, and
some array of it is the old one, changed element by element. A bare array does not
count, nor does a tuple of a few that are alike: those may be anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

from jaxstrategy.tracing._roles import Role
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.replication._contributions import (
    Inputs,
    contributions,
)
from jaxstrategy.values._types import TreeStructure


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of a pytree: its structure, and the place of its first leaf."""

    structure: TreeStructure
    start: int

    def __len__(self) -> int:
        return self.structure.num_leaves

    @property
    def is_anonymous(self) -> bool:
        """Whether it is a tuple or list of bare arrays."""
        # A leaf has no data, but only parts of several nodes are asked.
        kind, _ = cast("tuple[type, object]", self.structure.node_data())
        inner = self.structure.children()
        return kind in (tuple, list) and all(each.num_nodes == 1 for each in inner)

    def parts(self) -> Iterator[_Part]:
        """The parts it is made of."""
        start = self.start
        for structure in self.structure.children():
            yield _Part(structure, start)
            start += structure.num_leaves

    def all_parts(self) -> Iterator[_Part]:
        """It and all in it that are put together of something."""
        if self.structure.num_nodes > 1 and len(self):
            yield self
            for part in self.parts():
                yield from part.all_parts()


def successors(step: TracedStep) -> dict[int, int]:
    """For each result that takes the place of an argument which argument.

    Results are counted among all leaves, arguments among those that are arrays. Only
    arguments count that are equal on all replicas.
    """
    return _Matching(step).found()


class _Matching:
    """The search for the successors in one step."""

    def __init__(self, step: TracedStep) -> None:
        self._step = step
        arrays = [position for position, _ in step.results.array_paths()]
        self._outputs = {position: n for n, position in enumerate(arrays)}
        leaves = [r for r in enumerate(step.signature.roles) if r[1] is not Role.MASK]
        numbers = {at: n for n, at in enumerate(step.signature.dynamic)}
        # For each leaf of the arguments its place among the arrays.
        self._arguments = [
            numbers[at] if role is Role.SAME else None for at, role in leaves
        ]
        self._own = [
            numbers[at] if role is Role.PER_REPLICA else None for at, role in leaves
        ]
        self._inputs = {a: i for i, a in enumerate(step.inputs) if a is not None}
        self._contributions: list[Inputs] | None = None

    def found(self) -> dict[int, int]:
        """See `successors`."""
        found: dict[int, int] = {}
        given = [
            part
            for arguments in _Part(self._step.signature.treedef, 0).parts()
            for argument in arguments.parts()
            for part in argument.all_parts()
        ]
        self._match(_Part(self._step.results.treedef, 0), given, found)
        return found

    def _match(self, part: _Part, given: list[_Part], found: dict[int, int]) -> None:
        if part.structure.num_nodes <= 1 or not len(part):
            return
        alike = [
            other
            for other in given
            if len(other) == len(part) and other.structure == part.structure
        ]
        # State that was each replica's own before may stay so, also where it is moved
        # by what is equal on all, as towards the parameters of all replicas.
        if any(self._is_of_each_replica(part, other) for other in alike):
            return
        for other in alike:
            pairs = self._pairs(part, other, self._arguments)
            if pairs and self._is_update(pairs):
                found.update(pairs)
                return
        for inner in part.parts():
            self._match(inner, given, found)

    def _is_of_each_replica(self, part: _Part, other: _Part) -> bool:
        """Whether `part` takes the place of `other`, arrays of each replica alone."""
        if any(self._arguments[other.start + i] is not None for i in range(len(part))):
            return False
        pairs = self._pairs(part, other, self._own)
        return pairs is not None and bool(pairs) and self._is_update(pairs)

    def _pairs(
        self, part: _Part, other: _Part, arguments: Sequence[int | None]
    ) -> dict[int, int] | None:
        """Results and the `arguments` in the same places; None if types differ."""
        pairs = {}
        for offset in range(len(part)):
            output = self._outputs.get(part.start + offset)
            argument = arguments[other.start + offset]
            if output is None or argument is None:
                continue
            if not self._are_alike(output, argument):
                return None
            pairs[part.start + offset] = argument
        return None if part.is_anonymous and self._are_all_alike(pairs) else pairs

    def _are_all_alike(self, pairs: dict[int, int]) -> bool:
        types = [self._step.outputs[self._outputs[position]] for position in pairs]
        return len({(each.shape, each.dtype) for each in types}) <= 1

    def _are_alike(self, output: int, argument: int) -> bool:
        if argument not in self._inputs:
            return True  # not used at all
        new, old = self._step.outputs[output], self._step.type_of(argument)
        return new.shape == old.shape and new.dtype == old.dtype

    def _is_update(self, pairs: dict[int, int]) -> bool:
        # Only where something matches: it goes through the whole jaxpr, once.
        if self._contributions is None:
            self._contributions = contributions(self._step.jaxpr)
        return any(
            self._inputs.get(argument) in self._contributions[self._outputs[position]]
            for position, argument in pairs.items()
        )
