"""Arrays of JAX."""

from __future__ import annotations

from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxstrategy.checkpoint.sorts import _entries, _number_sort
from jaxstrategy.checkpoint.sorts._array_sort import AbstractArraySort
from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Entry,
    Reading,
)
from jaxstrategy.replicas import _mesh
from jaxstrategy.values import _building


@final
class DeviceArraySort(AbstractArraySort[jax.Array | jax.ShapeDtypeStruct]):
    """An array of JAX, or a `jax.ShapeDtypeStruct`."""

    @staticmethod
    def takes(value: object) -> bool:
        return isinstance(value, jax.Array | jax.ShapeDtypeStruct)

    def reading(self, entry: Entry) -> Reading | None:
        if entry["kind"] == "number":
            return None
        return _entries.array_reading(entry, self._sharding)

    def restored(self, entry: Entry, array: Array | None) -> object:
        if entry["kind"] == "number":
            array = np.asarray(_number_sort.number_of(entry), self.value.dtype)
        else:
            array = _entries.array_of(entry, array)
        if isinstance(array, jax.Array) and self._sharding in (None, array.sharding):
            return array
        if self._sharding is None:
            return jnp.asarray(array)
        return _mesh.place(array, self._sharding)

    def placed(self) -> object:
        if isinstance(self.value, jax.Array) and self.home is not None:
            if self._sharding != self.value.sharding:
                what = f"`{self.name}`"
                return _building.replicate_leaf(self.value, self.home, what)
        return self.value

    @property
    def _sharding(self) -> Sharding | None:
        """Its place; None for JAX's default device, uncommitted."""
        own = self.value.sharding
        is_free = own is None or isinstance(own, SingleDeviceSharding)
        if is_free and self.home is not None:
            return self.home
        # Placed, an uncommitted array would be committed: JAX then refuses to compute
        # with it and arrays of other devices.
        return own if getattr(self.value, "committed", True) else None
