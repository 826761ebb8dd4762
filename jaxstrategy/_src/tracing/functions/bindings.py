"""Bindings of the values that a function refers to: cells, dict entries, attributes."""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax

from jaxstrategy._src.tracing.functions.code import CALLABLE
from jaxstrategy._src.tracing.jaxprs.visit import KeyPath
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import PyTree


class _Unbound:
    """The class of `UNBOUND`."""


# The value of a binding that has none.
UNBOUND = _Unbound()


@dataclasses.dataclass(frozen=True, eq=False)
class Binding(abc.ABC):
    """A reference to a value that can be replaced: `owner` has it as `key`."""

    owner: Any
    key: Any = None

    @property
    def identity(self) -> Hashable:
        """Equal for the same binding, as long as its owner lives."""
        return id(self.owner), self.key

    @abc.abstractmethod
    def get(self) -> object:
        """The value, or `UNBOUND`."""

    @abc.abstractmethod
    def set(self, value: object) -> None:
        """Binds another value, or with `UNBOUND` none."""


class ClosureCell(Binding):
    """A free variable: `owner` is its cell."""

    def get(self) -> object:
        try:
            return self.owner.cell_contents
        except ValueError:  # not assigned yet
            return UNBOUND

    def set(self, value: object) -> None:
        if value is UNBOUND:
            del self.owner.cell_contents
        else:
            self.owner.cell_contents = value


class DictEntry(Binding):
    """A global variable, an attribute in `__dict__`, an item of a dict."""

    def get(self) -> object:
        return self.owner.get(self.key, UNBOUND)

    def set(self, value: object) -> None:
        if value is UNBOUND:
            self.owner.pop(self.key, None)
        else:
            self.owner[self.key] = value


class ListItem(Binding):
    """An item of a list."""

    def get(self) -> object:
        return self.owner[self.key] if self.key < len(self.owner) else UNBOUND

    def set(self, value: object) -> None:
        if value is UNBOUND:
            del self.owner[self.key]
        else:
            self.owner[self.key] = value


class Attribute(Binding):
    """An attribute that is in no dict: of a class, or in a slot."""

    def get(self) -> object:
        if isinstance(self.owner, type):  # without calling descriptors
            return vars(self.owner).get(self.key, UNBOUND)
        return getattr(self.owner, self.key, UNBOUND)

    def set(self, value: object) -> None:
        if value is UNBOUND:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, value)


def is_container(value: object) -> bool:
    """Whether `value` is an inner node of a pytree; None is one."""
    return not jax.tree_util.all_leaves([value])


def flatten_one_level(value: PyTree) -> tuple[list[tuple[KeyPath, PyTree]], Any]:
    """The children of a pytree node with their paths, and its structure."""
    # `Any`: to type checkers JAX's `PyTreeDef` is a variable, and no type.
    return jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda node: node is not value
    )


def substituted(value: Any, substitutes: Mapping[int, object]) -> Any:
    """`value`, or a copy of an immutable container, with values replaced by `id`."""
    if id(value) in substitutes:
        return substitutes[id(value)]
    # `Any`, and the class: `isinstance` calls code of some libraries' objects.
    kind = type(value)
    if issubclass(kind, types.MethodType):
        parts = [value.__func__, value.__self__]
        new = [substituted(part, substitutes) for part in parts]
        return value if are_identical(new, parts) else types.MethodType(*new)
    if issubclass(kind, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        func, *rest = new = [substituted(part, substitutes) for part in parts]
        if are_identical(new, parts):
            return value
        n = len(value.args)
        keywords = dict(zip(value.keywords, rest[n:], strict=True))
        return kind(func, *rest[:n], **keywords)
    if issubclass(kind, tuple):
        new = [substituted(part, substitutes) for part in value]
        if are_identical(new, value):
            return value
        return kind(*new) if hasattr(kind, "_fields") else kind(new)
    if issubclass(kind, (list, dict, type, *CALLABLE)) or trees.is_whole(value):
        return value
    if is_container(value):
        children, structure = flatten_one_level(value)
        parts = [child for _, child in children]
        new = [substituted(part, substitutes) for part in parts]
        return value if are_identical(new, parts) else structure.unflatten(new)
    return value


def are_identical(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
