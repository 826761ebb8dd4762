"""Bindings of the values that a function refers to: cells, dict entries, attributes."""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax

from jaxstrategy._src.tracing.functions.code import CALLABLE
from jaxstrategy._src.tracing.jaxprs import KeyPath
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import PyTree


class _Unbound:
    """The class of `UNBOUND`."""


# The value of a binding that has none.
UNBOUND = _Unbound()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Binding:
    """A reference to a value that can be replaced.

    Attributes:
      owner: a dict or list that has it as `key`; or an object, a class or a closure
        cell of which it is the attribute `key`.
    """

    owner: Any
    key: Any = "cell_contents"

    @property
    def identity(self) -> Hashable:
        """Equal for the same binding, as long as its owner lives."""
        return id(self.owner), self.key

    def get(self) -> object:
        """The value, or `UNBOUND`."""
        kind = type(self.owner)
        if issubclass(kind, dict):
            return self.owner.get(self.key, UNBOUND)
        if issubclass(kind, list):
            return self.owner[self.key] if self.key < len(self.owner) else UNBOUND
        if issubclass(kind, type):  # without calling descriptors
            return vars(self.owner).get(self.key, UNBOUND)
        try:
            return getattr(self.owner, self.key, UNBOUND)
        except ValueError:  # a variable that is not assigned yet
            return UNBOUND

    def set(self, value: object) -> None:
        """Binds another value, or with `UNBOUND` none."""
        is_item = issubclass(type(self.owner), (dict, list))
        if value is not UNBOUND:
            assign = operator.setitem if is_item else setattr
            assign(self.owner, self.key, value)
        elif self.get() is not UNBOUND:
            remove = operator.delitem if is_item else delattr
            remove(self.owner, self.key)


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
