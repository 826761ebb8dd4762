"""Strings, which the record itself holds."""

from __future__ import annotations

from typing import final

from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Entry,
    Reading,
)
from jaxstrategy.checkpoint.sorts._sort import Sort


@final
class TextSort(Sort[str]):
    """A string."""

    kind = "text"

    @staticmethod
    def takes(value: object) -> bool:
        return isinstance(value, str)

    @staticmethod
    def is_entry(fields: Entry) -> bool:
        match fields:
            case {"value": str(), **more}:
                return not more
        return False

    @staticmethod
    def told_of(entry: Entry) -> str:
        return "a string"

    @property
    def describe(self) -> str:
        return "a string"

    def saved(self) -> tuple[Entry, Array | None]:
        return {"kind": self.kind, "value": self.value}, None

    def difference(self, entry: Entry, told: str) -> str | None:
        return None if entry["kind"] == "text" else self.differs(told)

    def reading(self, entry: Entry) -> Reading | None:
        return None

    def restored(self, entry: Entry, array: Array | None) -> object:
        return entry["value"]
