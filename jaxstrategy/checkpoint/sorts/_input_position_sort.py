"""Positions of passes over datasets, one for each process in the record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import jax

from jaxstrategy.checkpoint.processes import _checkpoint_agreement
from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Entry,
    Reading,
)
from jaxstrategy.checkpoint.sorts._sort import Sort
from jaxstrategy.inputs._abstract_input_iterator import AbstractInputIterator


@final
class InputPositionSort(Sort[AbstractInputIterator]):
    """The position of a pass over a dataset."""

    kind = "iterator"
    may_refuse = True

    @staticmethod
    def takes(value: object) -> bool:
        return isinstance(value, AbstractInputIterator)

    @staticmethod
    def is_entry(fields: Entry) -> bool:
        match fields:
            case {"states": [_, *_], **more}:
                return not more
        return False

    @staticmethod
    def told_of(entry: Entry) -> str:
        return "the state of an iterator"

    @property
    def describe(self) -> str:
        return "an iterator"

    def saved(self) -> tuple[Entry, Array | None]:
        try:
            state = self.value.get_state()
        except TypeError as error:
            raise TypeError(f"`{self.name}` cannot be saved: {error}") from error
        what = f"save the position of `{self.name}`"
        return {
            "kind": self.kind,
            "states": _checkpoint_agreement.agree(what, state),
        }, None

    def difference(self, entry: Entry, told: str) -> str | None:
        if entry["kind"] != "iterator":
            return self.differs(told)
        states = entry["states"]
        if len(states) == jax.process_count() or states.count(states[0]) == len(states):
            return None
        return (
            f"`{self.name}` was read by {len(states)} processes, each a part of its "
            f"own, and there are {jax.process_count()} now; use as many, or a source "
            "that all processes read alike (`jaxstrategy.batches`)"
        )

    def reading(self, entry: Entry) -> Reading | None:
        return None

    def restored(self, entry: Entry, array: Array | None) -> object:
        states = entry["states"]
        is_own = len(states) == jax.process_count()
        return states[jax.process_index() if is_own else 0]

    def put(self, restored: Any) -> AbstractInputIterator:
        try:
            self.value.set_state(restored)
        except (TypeError, ValueError) as error:
            error.add_note(f"`{self.name}` was to be restored from a checkpoint.")
            raise
        return self.value

    def undo(self) -> Callable[[], object]:
        try:
            state = self.value.get_state()
        except TypeError:  # cannot be resumed, so it cannot be set either
            return lambda: None
        return lambda: self.value.set_state(state)
