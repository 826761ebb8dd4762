"""Numbers of Python, which the record itself holds."""

from __future__ import annotations

from typing import final

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxstrategy.checkpoint.sorts import _entries
from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Entry,
    Reading,
)
from jaxstrategy.checkpoint.sorts._sort import Sort

_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}
# What a number may become; the first it is.
_ABSTRACT = {
    "bool": jnp.bool_,
    "int": jnp.integer,
    "float": jnp.floating,
    "complex": jnp.complexfloating,
}


@final
class NumberSort(Sort[complex]):
    """A number of Python."""

    kind = "number"

    @staticmethod
    def takes(value: object) -> bool:
        return type(value) in _NUMBERS.values()

    @staticmethod
    def is_entry(fields: Entry) -> bool:
        match fields:
            case {"type": str(kind), "value": number, **more}:
                return not more and _is_number(kind, number)
        return False

    @staticmethod
    def told_of(entry: Entry) -> str:
        return f"a Python {entry['type']}"

    @property
    def describe(self) -> str:
        return f"a Python {type(self.value).__name__}"

    def saved(self) -> tuple[Entry, Array | None]:
        value = self.value
        if isinstance(value, complex):
            value = [value.real, value.imag]
        kind = type(self.value).__name__
        return {"kind": self.kind, "type": kind, "value": value}, None

    def difference(self, entry: Entry, told: str) -> str | None:
        kind = type(self.value).__name__
        if entry["kind"] == "number":
            fits = entry["type"] == kind
        else:
            fits = entry["kind"] == "array" and entry["shape"] == []
            fits = fits and "impl" not in entry
            fits = fits and jnp.issubdtype(jnp.dtype(entry["dtype"]), _ABSTRACT[kind])
        return None if fits else self.differs(told)

    def reading(self, entry: Entry) -> Reading | None:
        return (
            None if entry["kind"] == "number" else _entries.array_reading(entry, None)
        )

    def restored(self, entry: Entry, array: Array | None) -> object:
        if entry["kind"] == "number":
            return number_of(entry)
        assert array is not None, "it has an element"
        return type(self.value)(array.item())


def _is_number(kind: str, number: object) -> bool:
    if kind == "complex":
        return (
            isinstance(number, list)
            and len(number) == 2
            and all(type(part) is float for part in number)
        )
    return kind in _NUMBERS and type(number) is _NUMBERS[kind]


def fits_number(entry: Entry, dtype: DTypeLike) -> bool:
    """Whether a Python number that was saved may become a scalar of this dtype."""
    names = list(_ABSTRACT)
    for name in names[names.index(entry["type"]) :]:
        if jnp.issubdtype(dtype, _ABSTRACT[name]):
            return True
    return False


def number_of(entry: Entry) -> complex:
    """The number of Python that was saved."""
    value = entry["value"]
    return complex(*value) if entry["type"] == "complex" else value
