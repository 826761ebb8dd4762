"""Variables in several shards."""

from __future__ import annotations

import itertools
from typing import Any, TypeGuard, final

import jax
import numpy as np

from jaxstrategy.checkpoint.sorts import _entries
from jaxstrategy.checkpoint.sorts._array_sort import AbstractArraySort
from jaxstrategy.checkpoint.sorts._device_array_sort import DeviceArraySort
from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Entry,
    Reading,
)
from jaxstrategy.checkpoint.sorts._variable_sort import check_has_value
from jaxstrategy.variables._sharded_variable import ShardedVariable


@final
class ShardedVariableSort(AbstractArraySort[ShardedVariable]):
    """A `ShardedVariable`, of which all is saved as one array.

    So it is restored into shards of any number, or into one variable or array. The
    array goes over the host, on which it is cut: no device need have all of it.
    """

    @staticmethod
    def takes(value: object) -> TypeGuard[ShardedVariable]:
        if not isinstance(value, ShardedVariable):
            return False
        # What JAX puts in the place of shards may be anything.
        are_arrays = all(map(DeviceArraySort.takes, value.variables))
        return value.holds_variables or are_arrays

    def saved(self) -> tuple[Entry, Array | None]:
        self._check()
        for shard in self.value.variables:
            _entries.check_alive(shard, self.name)
        if any(isinstance(each, jax.ShapeDtypeStruct) for each in self.value.variables):
            struct = jax.ShapeDtypeStruct(self.value.shape, self.value.dtype)
            return DeviceArraySort(self.name, struct, None).saved()
        return _entries.array_entry(self.value.numpy())

    def difference(self, entry: Entry, told: str) -> str | None:
        self._check()
        return super().difference(entry, told)

    def reading(self, entry: Entry) -> Reading | None:
        return _entries.array_reading(entry, None)

    def restored(self, entry: Entry, array: Array | None) -> object:
        whole = np.asarray(_entries.array_of(entry, array))
        if self.value.holds_variables:
            return whole
        shards, structure = jax.tree.flatten(self.value)
        ends = itertools.accumulate((len(each) for each in shards), initial=0)
        parts = [
            DeviceArraySort(self.name, shard, self.home).restored(
                {**entry, "shape": list(shard.shape)}, whole[start:stop]
            )
            for shard, (start, stop) in zip(
                shards, itertools.pairwise(ends), strict=True
            )
        ]
        return jax.tree.unflatten(structure, parts)

    def put(self, restored: Any) -> object:
        if not self.value.holds_variables:
            return restored
        self.value.assign(restored)
        return self.value

    def _check(self) -> None:
        if self.value.holds_variables:
            for shard in self.value.variables:
                check_has_value(self.name, shard)
