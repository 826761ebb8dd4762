"""A state as what is written of it, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, final

from jaxstrategy.checkpoint._checkpoint_errors import MismatchError
from jaxstrategy.checkpoint._entries import Entry, Reading
from jaxstrategy.checkpoint._slots import Slots
from jaxstrategy.checkpoint.sorts._sorts import (
    InputPosition,
    VariableSort,
    sort_of,
)
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values._per_replica import PyTree


@final
@dataclasses.dataclass(frozen=True)
class Fit:
    """How the names of a state and those of a checkpoint compare.

    Attributes:
      common: names that both have.
      missing: names that only the state has.
      unexpected: names that only the checkpoint has.
    """

    common: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@final
class WrittenState:
    """The values of a state, by name.

    Args:
      state: any pytree.
      replicas: where values go that lie nowhere yet, None for JAX's default device.

    Raises:
      TypeError: a value cannot be in a checkpoint.
    """

    def __init__(self, state: PyTree, replicas: Replicas | None) -> None:
        self._slots = Slots(state)
        self._sorts = {
            slot.name: sort_of(slot.name, slot.value, replicas)
            for slot in self._slots.all
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Of the values, in their order."""
        return tuple(self._sorts)

    def saved(self) -> tuple[dict[str, Entry], dict[str, Any]]:
        """What the record says of each value, and the arrays to write."""
        saved = {name: sort.saved() for name, sort in self._sorts.items()}
        entries = {name: entry for name, (entry, _) in saved.items()}
        arrays = {name: array for name, (_, array) in saved.items()}
        return entries, {k: array for k, array in arrays.items() if array is not None}

    def placed(self) -> PyTree:
        """The state as it is, where a restored one would be."""
        values = {name: sort.placed() for name, sort in self._sorts.items()}
        return self._with(values)

    def fit(self, entries: Mapping[str, Entry], where: str, partial: bool) -> Fit:
        """Compare with what a checkpoint has.

        Raises:
          MismatchError: something differs; unless `partial`, something is missing.
        """
        common = tuple(name for name in self._sorts if name in entries)
        missing = tuple(name for name in self._sorts if name not in entries)
        unexpected = tuple(name for name in entries if name not in self._sorts)
        found = [self._sorts[name].difference(entries[name]) for name in common]
        differing = [text for text in found if text is not None]
        if differing or (not partial and (missing or unexpected)):
            raise MismatchError(where, missing, unexpected, differing)
        return Fit(common, missing, unexpected)

    def readings(
        self, entries: Mapping[str, Entry], names: tuple[str, ...]
    ) -> dict[str, Reading]:
        """How arrays are to be read."""
        found = {name: self._sorts[name].reading(entries[name]) for name in names}
        return {name: reading for name, reading in found.items() if reading is not None}

    def restored(
        self,
        entries: Mapping[str, Entry],
        names: tuple[str, ...],
        arrays: Mapping[str, Any],
    ) -> PyTree:
        """The state with what was saved; objects, variables and iterators are changed.

        All or nothing: what can fail comes before anything is changed for good.
        """
        values = {
            name: self._sorts[name].restored(entries[name], arrays.get(name))
            for name in names
        }
        self._set_iterators(values)
        return self._with(values)

    def _set_iterators(self, values: dict[str, Any]) -> None:
        """Set all iterators, or none; in `values` they take the place of states."""
        undo: list[Callable[[], None]] = []
        for name in [n for n in values if isinstance(self._sorts[n], InputPosition)]:
            iterator = self._sorts[name].value
            undo.append(_undo(iterator))
            try:
                iterator.set_state(values[name])
            except (TypeError, ValueError) as error:
                for back in undo:
                    back()
                error.add_note(f"`{name}` was to be restored from a checkpoint.")
                raise
            values[name] = iterator

    def _with(self, values: Mapping[str, Any]) -> PyTree:
        values = dict(values)
        for slot in self._slots.all:
            if slot.name not in values:
                continue
            if isinstance(self._sorts[slot.name], VariableSort):
                variable, value = slot.value, values[slot.name]
                if value is not variable:
                    variable.assign(value)
                values[slot.name] = variable
            elif slot.store is not None:
                slot.store(values[slot.name])
        return self._slots.filled(values)


def _undo(iterator: Any) -> Callable[[], None]:
    try:
        state = iterator.get_state()
    except TypeError:  # cannot be resumed, so it cannot be set either
        return lambda: None
    return lambda: iterator.set_state(state)
