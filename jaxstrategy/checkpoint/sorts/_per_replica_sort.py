"""Values that each replica has one of."""

from __future__ import annotations

from typing import final

import jax
import numpy as np
from jax.sharding import Sharding

from jaxstrategy.checkpoint.sorts import _entries
from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Entry,
    Reading,
)
from jaxstrategy.checkpoint.sorts._sort import Sort
from jaxstrategy.replicas import _mesh
from jaxstrategy.text._array_types import array_type
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import PerReplica


@final
class PerReplicaSort(Sort[PerReplica]):
    """A `PerReplica`, which is no logical value, but one for each replica."""

    kind = "per_replica"

    @staticmethod
    def takes(value: object) -> bool:
        return isinstance(value, PerReplica)

    @staticmethod
    def is_entry(fields: Entry) -> bool:
        match fields:
            case {"dtype": str(dtype), "shape": [_, *_] as shape, **more}:
                mask = more.pop("mask", [])
                is_mask = isinstance(mask, list) and _is_mask(mask)
                return is_mask and _entries.is_array(dtype, shape, more)
        return False

    @staticmethod
    def told_of(entry: Entry) -> str:
        shape = array_type(entry["dtype"], entry["shape"][1:])
        return f"a PerReplica of {shape} for {entry['shape'][0]} replicas"

    @property
    def describe(self) -> str:
        held = _per_replica.contents(self.value)
        shape = array_type(held.dtype, held.shape[1:])
        return f"a PerReplica of {shape} for {held.shape[0]} replicas"

    def saved(self) -> tuple[Entry, Array | None]:
        held = _per_replica.contents(self.value)
        if not hasattr(held, "dtype"):
            raise TypeError(
                f"`{self.name}` is a PerReplica of a {type(held).__name__}; one of an "
                "array was wanted."
            )
        _entries.check_alive(held, self.name)
        entry, array = _entries.array_entry(held, self.kind)
        if self.value.mask is not None:
            entry["mask"] = np.asarray(self.value.mask).tolist()
        return entry, array

    def difference(self, entry: Entry, told: str) -> str | None:
        if told == self.describe:
            return None
        text = self.differs(told)
        if entry["kind"] != self.kind:
            return text
        return (
            f"{text}; versions of single replicas mean nothing to another number of "
            "them: reduce the value before saving (`strategy.reduce`)"
        )

    def reading(self, entry: Entry) -> Reading | None:
        return _entries.array_reading(entry, self._sharding)

    def restored(self, entry: Entry, array: Array | None) -> object:
        array = _entries.array_of(entry, array)
        if self._sharding is not None:
            array = _mesh.place(array, self._sharding)
        restored = PerReplica(array)
        if "mask" not in entry:
            return restored
        mask = np.asarray(entry["mask"], bool)
        if isinstance(self.value.mask, jax.Array):
            mask = _mesh.place(mask, self.value.mask.sharding)
        return _per_replica.with_mask(restored, mask)

    @property
    def _sharding(self) -> Sharding | None:
        held = _per_replica.contents(self.value)
        return getattr(held, "sharding", None)


def _is_mask(mask: list[object]) -> bool:
    try:
        # Of lists of several lengths NumPy makes no array.
        return np.asarray(mask).dtype in (np.dtype(bool), np.dtype(float))
    except ValueError:
        return False
