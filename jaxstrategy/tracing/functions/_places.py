"""Where a value is referred to from: a cell, an attribute, an entry of a container."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable, MutableMapping
from typing import Any, Protocol


class _Gone:
    def __repr__(self) -> str:
        return "nothing"


# What a place holds that holds nothing.
GONE = _Gone()


class Place(Protocol):
    """Something that can be made to refer to another value."""

    @property
    def owner(self) -> object:
        """The object that the place is in."""
        ...

    @property
    def where(self) -> Hashable:
        """Equal for the same place, as long as it is there."""
        ...

    def get(self) -> object:
        """The value; `GONE` if there is none."""
        ...

    def set(self, value: object) -> None:
        """Refer to `value`, or with `GONE` to nothing."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ClosureCell:
    """A variable of an enclosing function."""

    cell: types.CellType

    @property
    def owner(self) -> object:
        """The cell."""
        return self.cell

    @property
    def where(self) -> Hashable:
        """The identity of the cell."""
        return (id(self.cell),)

    def get(self) -> object:
        """The value of the variable."""
        try:
            return self.cell.cell_contents
        except ValueError:  # not set yet
            return GONE

    def set(self, value: object) -> None:
        """Gives the variable another value."""
        if value is GONE:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    """An entry of a dict: a global name, an attribute, an item."""

    # `Any`: a dict that has names as keys is no mapping of all that can be hashed.
    mapping: MutableMapping[Any, object]
    key: Hashable

    @property
    def owner(self) -> object:
        """The dict."""
        return self.mapping

    @property
    def where(self) -> Hashable:
        """The identity of the dict, and the key."""
        return (id(self.mapping), self.key)

    def get(self) -> object:
        """The value of the entry."""
        return self.mapping.get(self.key, GONE)

    def set(self, value: object) -> None:
        """Gives the entry another value."""
        if value is GONE:
            self.mapping.pop(self.key, None)
        else:
            self.mapping[self.key] = value


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """An entry of a list."""

    items: list[object]
    index: int

    @property
    def owner(self) -> object:
        """The list."""
        return self.items

    @property
    def where(self) -> Hashable:
        """The identity of the list, and the index."""
        return (id(self.items), self.index)

    def get(self) -> object:
        """The entry."""
        return self.items[self.index] if self.index < len(self.items) else GONE

    def set(self, value: object) -> None:
        """Puts another entry there, or takes it out."""
        if value is GONE:
            del self.items[self.index]
        else:
            self.items[self.index] = value


@dataclasses.dataclass(frozen=True, eq=False)
class Attribute:
    """An attribute that is in no dict: of a class, or in a slot."""

    owner: object
    name: str

    @property
    def where(self) -> Hashable:
        """The identity of the owner, and the name."""
        return (id(self.owner), self.name)

    def get(self) -> object:
        """The value of the attribute."""
        if isinstance(self.owner, type):  # not what a descriptor makes of it
            return vars(self.owner).get(self.name, GONE)
        return getattr(self.owner, self.name, GONE)

    def set(self, value: object) -> None:
        """Gives the attribute another value."""
        if value is GONE:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)
