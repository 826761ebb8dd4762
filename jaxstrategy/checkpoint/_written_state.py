"""A state as what is written of it, and back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import final

from jax.sharding import NamedSharding

from jaxstrategy.checkpoint._slots import Slot, Slots
from jaxstrategy.checkpoint.folders._checkpoint_errors import MismatchError
from jaxstrategy.checkpoint.sorts._device_array_sort import DeviceArraySort
from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Entry,
    Reading,
)
from jaxstrategy.checkpoint.sorts._sorts import described, sort_of
from jaxstrategy.contexts._abstract_strategy import AbstractStrategy
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values._state_placement import sharding_of
from jaxstrategy.values._types import PyTree


@final
@dataclasses.dataclass(frozen=True)
class Fit:
    """A comparison of the names in a state with those in a checkpoint.

    Attributes:
      common: names that both have.
      missing: names that only the state has.
      unexpected: names that only the checkpoint has.
    """

    common: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def _home(slot: Slot, replicas: Replicas | None) -> NamedSharding | None:
    """The place of an array that lies nowhere yet; None for JAX's default device."""
    if replicas is None or not DeviceArraySort.takes(slot.value):
        return None
    return sharding_of(slot.path, slot.value, slot.is_optimizer, replicas)


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
            slot.name: sort_of(slot.name, slot.value, _home(slot, replicas))
            for slot in self._slots.all
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values, in their order."""
        return tuple(self._sorts)

    @contextlib.contextmanager
    def snapshot(self, step: int) -> Iterator[None]:
        """For a `with` block: what is read in it is of one moment.

        Args:
          step: of the checkpoint.
        """
        owners = [getattr(slot.value, "strategy", None) for slot in self._slots.all]
        strategies = [each for each in owners if isinstance(each, AbstractStrategy)]
        with contextlib.ExitStack() as stack:
            for strategy in {id(each): each for each in strategies}.values():
                stack.enter_context(strategy._variable_policy.snapshot(step))
            yield

    def saved(self) -> tuple[dict[str, Entry], dict[str, Array]]:
        """The entry of each value, and the arrays to write."""
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
        found = [
            self._sorts[name].difference(entries[name], described(entries[name]))
            for name in common
        ]
        differing = [text for text in found if text is not None]
        if differing or (not partial and (missing or unexpected)):
            raise MismatchError(where, missing, unexpected, differing, partial)
        return Fit(common, missing, unexpected)

    def readings(
        self, entries: Mapping[str, Entry], names: tuple[str, ...]
    ) -> dict[str, Reading]:
        """The readings of the arrays that were saved."""
        found = {name: self._sorts[name].reading(entries[name]) for name in names}
        return {name: reading for name, reading in found.items() if reading is not None}

    def restored(
        self,
        entries: Mapping[str, Entry],
        names: tuple[str, ...],
        arrays: Mapping[str, Array],
    ) -> PyTree:
        """The state with what was saved; objects, variables and iterators are changed.

        All or nothing: what can fail comes before anything is changed for good.
        """
        values = {
            name: self._sorts[name].restored(entries[name], arrays.get(name))
            for name in names
        }
        self._put_what_may_refuse(values)
        return self._with(values)

    def _put_what_may_refuse(self, values: dict[str, object]) -> None:
        """Put all of these values, or none; in `values` objects take their place."""
        undo: list[Callable[[], object]] = []
        for sort in [self._sorts[name] for name in values]:
            if not sort.may_refuse:
                continue
            undo.append(sort.undo())
            try:
                values[sort.name] = sort.put(values[sort.name])
            except (TypeError, ValueError):
                for back in undo:
                    back()
                raise

    def _with(self, values: Mapping[str, object]) -> PyTree:
        """The state with other values, in objects that change in place, too."""
        values = dict(values)
        for slot in self._slots.all:
            if slot.name not in values or values[slot.name] is slot.value:
                continue
            values[slot.name] = self._sorts[slot.name].put(values[slot.name])
            if slot.store is not None and values[slot.name] is not slot.value:
                slot.store(values[slot.name])
        return self._slots.filled(values)
