"""Arrays and scalars of NumPy."""

from __future__ import annotations

from typing import final

import numpy as np

from jaxstrategy.checkpoint.sorts import _entries, _number_sort
from jaxstrategy.checkpoint.sorts._array_sort import AbstractArraySort
from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Entry,
    Reading,
)


@final
class HostArraySort(AbstractArraySort[np.ndarray | np.generic]):
    """An array of NumPy, or a scalar of it."""

    @staticmethod
    def takes(value: object) -> bool:
        return isinstance(value, np.ndarray | np.generic)

    def saved(self) -> tuple[Entry, Array | None]:
        # Objects, bytes, text, times and differences of times: JAX has none of them.
        if self.value.dtype.kind in "OSUMm":
            raise TypeError(
                f"`{self.name}` is an array of {self.value.dtype}, which a checkpoint "
                "cannot hold. Save numbers, or what JSON can say in `extra`."
            )
        return super().saved()

    def reading(self, entry: Entry) -> Reading | None:
        return (
            None if entry["kind"] == "number" else _entries.array_reading(entry, None)
        )

    def restored(self, entry: Entry, array: Array | None) -> object:
        if entry["kind"] == "number":
            array = np.asarray(_number_sort.number_of(entry), self.value.dtype)
        array = np.asarray(_entries.array_of(entry, array))
        return array[()] if isinstance(self.value, np.generic) else array
