"""Iterators of workers as functions see them: `IteratorSlot`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NoReturn, final

import jax
import numpy as np

from jaxstrategy._errors import ContextError
from jaxstrategy.parameter_servers._shipped_program import ElementType, Input
from jaxstrategy.scheduled import _recorder
from jaxstrategy.scheduled._recorder import Recorder
from jaxstrategy.scheduled._worker_argument import Element
from jaxstrategy.values._types import PyTree


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


@final
@dataclasses.dataclass(frozen=True)
class IteratorSlot:
    """The iterator of whichever worker runs the function, while it is traced.

    Args:
      number: among the iterators that the function is given.
      elements: what it gives, one after the other; those after the last are alike.
    """

    number: int
    elements: tuple[Element, ...]

    def type(self, turn: int) -> Element:
        """What the element is like of which so many are taken before."""
        return self.elements[min(turn, len(self.elements) - 1)]

    def retyped(self, found: Sequence[ElementType]) -> IteratorSlot:
        """This one with elements of other types.

        Raises:
          ValueError: they have another structure.
        """
        structure = self.elements[0].structure
        for each in found:
            if each.structure != str(structure):
                raise ValueError(
                    "An element of a dataset has another structure than the first: "
                    f"{each.structure} instead of {structure}. Shapes may differ, but "
                    "all elements need one structure."
                )
        # Those that were not looked at yet are likely as the first was.
        types = [*(Element(each, structure) for each in found), self.elements[-1]]
        return dataclasses.replace(self, elements=tuple(types))

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "A scheduled function goes through an iterator of its worker with `for`: "
            "how many elements there are is not known while it is traced. Take as many "
            "as one call is to use, `for _ in range(steps): batch = next(iterator)`, "
            "and schedule it again for the others."
        )

    def __next__(self) -> PyTree:
        recorder = self._recorder()
        return self._taken(recorder, recorder.turn(self.number))

    def get_next(self) -> PyTree:
        """The next element; at the end the call ends with `OutOfRangeError`."""
        return next(self)

    def get_next_as_optional(self) -> OptionalElement:
        """The next element if there is one, and whether there is."""
        recorder = self._recorder()
        turn = recorder.turn(self.number)
        present = recorder.input(Input("present", self.number, turn), (), np.bool_)
        return OptionalElement(self._taken(recorder, turn), present)

    def _recorder(self) -> Recorder:
        recorder = _recorder.current()
        if recorder is None:
            raise ContextError(
                "An iterator of workers was used outside of the function that it was "
                "passed to. Its elements are on the workers: use them in the function."
            )
        return recorder

    def _taken(self, recorder: Recorder, turn: int) -> PyTree:
        element = self.type(turn)
        nodes: list[PyTree] = []
        last: jax.Array | None = None
        for leaf, ((shape, dtype), is_split, is_mask) in enumerate(
            zip(*element.type[1:], strict=True)
        ):
            given = Input("element", self.number, turn, leaf)
            own = shape[1:] if is_split else shape
            array = recorder.input(given, own, dtype, is_split)
            if is_mask:
                assert last is not None, "a mask follows its leaf"
                recorder.note_mask(last, array, (self.number, turn))
                continue
            last = array
            nodes.append(recorder.across(array) if is_split else array)
        return jax.tree.unflatten(element.structure, nodes)
