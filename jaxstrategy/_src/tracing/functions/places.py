"""Where a function has the values that it refers to, and how to put others there."""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections.abc import (
    Hashable,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, Protocol

import jax

from jaxstrategy._src.tracing.functions.code import CALLABLE
from jaxstrategy._src.tracing.jaxprs.visit import KeyPath
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import PyTree


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


def is_container(value: object) -> bool:
    """Whether `value` is a node of pytrees and no leaf; None is one."""
    return not jax.tree_util.all_leaves([value])


def one_level(value: PyTree) -> tuple[list[tuple[KeyPath, PyTree]], Any]:
    """The values that a registered container holds, and its structure."""
    # `Any`: to type checkers JAX's `PyTreeDef` is a variable, and no type.
    return jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda node: node is not value
    )


def rebuilt(value: Any, others: Mapping[int, object]) -> Any:
    """`value`, or if it holds one of `others` and cannot be changed, one like it."""
    if id(value) in others:
        return others[id(value)]
    # `Any`, and the class: `isinstance` asks some libraries' objects.
    kind = type(value)
    if issubclass(kind, types.MethodType):
        parts = [value.__func__, value.__self__]
        new = [rebuilt(part, others) for part in parts]
        return value if are_same(new, parts) else types.MethodType(*new)
    if issubclass(kind, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        func, *rest = new = [rebuilt(part, others) for part in parts]
        if are_same(new, parts):
            return value
        n = len(value.args)
        keywords = dict(zip(value.keywords, rest[n:], strict=True))
        return kind(func, *rest[:n], **keywords)
    if issubclass(kind, tuple):
        new = [rebuilt(part, others) for part in value]
        if are_same(new, value):
            return value
        return kind(*new) if hasattr(kind, "_fields") else kind(new)
    if issubclass(kind, (list, dict, type, *CALLABLE)) or trees.is_whole(value):
        return value
    if is_container(value):
        children, structure = one_level(value)
        parts = [child for _, child in children]
        new = [rebuilt(part, others) for part in parts]
        return value if are_same(new, parts) else structure.unflatten(new)
    return value


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
