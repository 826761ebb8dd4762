"""Iterators of workers as functions see them: `IteratorSlot`."""

from __future__ import annotations

import dataclasses
from typing import Protocol, Self, final, runtime_checkable

import jax
import numpy as np

from jaxstrategy._errors import ContextError
from jaxstrategy.parameter_servers._shipped_program import ElementType, Input
from jaxstrategy.scheduled import _recorder
from jaxstrategy.values._types import PyTree, TreeStructure


@final
@dataclasses.dataclass(frozen=True)
class Element:
    """What each element of an iterator is like.

    Attributes:
      type: as programs know it.
      structure: of its pytree, with `PerReplica`s as leaves.
    """

    type: ElementType
    structure: TreeStructure


@final
class OptionalElement:
    """An element of a worker's iterator, or none.

    Args:
      value: the element; zeros if there is none.
      present: whether there is one.
    """

    def __init__(self, value: PyTree, present: jax.Array) -> None:
        self._value, self._present = value, present

    def has_value(self) -> jax.Array:
        """Whether there is one, a boolean scalar that only the worker knows."""
        return self._present

    def get_value(self) -> PyTree:
        """The element; zeros of its shapes where there is none."""
        return self._value


@runtime_checkable
class IteratorArgument(Protocol):
    """What a caller passes in place of each worker's own iterator."""

    @property
    def element(self) -> Element:
        """What each element is like."""
        ...

    @property
    def resource(self) -> int:
        """The number of the resource on each worker."""
        ...


@final
@dataclasses.dataclass(frozen=True)
class IteratorSlot:
    """The iterator of whichever worker runs the function, while it is traced.

    Args:
      number: among the iterators that the function is given.
      element: what it gives.
    """

    number: int
    element: Element

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PyTree:
        return self._taken(self._turn())

    def get_next(self) -> PyTree:
        """The next element; at the end the call ends with `OutOfRangeError`."""
        return next(self)

    def get_next_as_optional(self) -> OptionalElement:
        """The next element if there is one, and whether there is."""
        turn = self._turn()
        recorder = _recorder.current()
        assert recorder is not None
        present = recorder.input(Input("present", self.number, turn), (), np.bool_)
        return OptionalElement(self._taken(turn), present)

    def _turn(self) -> int:
        recorder = _recorder.current()
        if recorder is None:
            raise ContextError(
                "An iterator of workers was used outside of the function that it was "
                "passed to. Its elements are on the workers: use them in the function."
            )
        return recorder.turn(self.number)

    def _taken(self, turn: int) -> PyTree:
        recorder = _recorder.current()
        assert recorder is not None
        leaves = []
        types = zip(self.element.type.types, self.element.type.split, strict=True)
        for leaf, ((shape, dtype), is_split) in enumerate(types):
            given = Input("element", self.number, turn, leaf)
            own = shape[1:] if is_split else shape
            array = recorder.input(given, own, dtype, is_split)
            leaves.append(recorder.across(array) if is_split else array)
        return jax.tree.unflatten(self.element.structure, leaves)
