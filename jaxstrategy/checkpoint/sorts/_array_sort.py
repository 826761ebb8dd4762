"""Arrays of JAX, of NumPy and of variables."""

from __future__ import annotations

from typing import TypeVar, cast

from jaxstrategy.checkpoint.sorts import _entries, _number_sort
from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Entry,
)
from jaxstrategy.checkpoint.sorts._sort import Sort
from jaxstrategy.replicas._random_keys import is_key
from jaxstrategy.text._array_types import Shaped, array_type

_V = TypeVar("_V", bound=Shaped)


class AbstractArraySort(Sort[_V]):
    """An array, of JAX or NumPy, or what is written as one."""

    kind = "array"

    @staticmethod
    def is_entry(fields: Entry) -> bool:
        match fields:
            case {"dtype": str(dtype), "shape": list(shape), **more}:
                return _entries.is_array(dtype, shape, more)
        return False

    @staticmethod
    def told_of(entry: Entry) -> str:
        return array_type(entry["dtype"], entry["shape"])

    @property
    def describe(self) -> str:
        return array_type(self.value.dtype, self.value.shape)

    def saved(self) -> tuple[Entry, Array | None]:
        _entries.check_alive(self.value, self.name)
        return _entries.array_entry(cast(_entries.AnyArray, self.value))

    def difference(self, entry: Entry, told: str) -> str | None:
        if entry["kind"] == "number" and self.value.shape == ():
            fits = not is_key(self.value.dtype) and _number_sort.fits_number(
                entry, self.value.dtype
            )
        else:
            fits = told == self.describe
        return None if fits else self.differs(told)
