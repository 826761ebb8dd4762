"""Values like others, with something else in the place of what they hold."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxstrategy.tracing.jaxprs._visit import KeyPath
from jaxstrategy.values import _trees
from jaxstrategy.values._types import PyTree

_CALLABLE = (types.FunctionType, types.MethodType, functools.partial)


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
    """`value`, or if it holds one of `others` and cannot be changed, one like it.

    Args:
      value: anything.
      others: what takes the place of an object, by the identity of that.
    """
    if id(value) in others:
        return others[id(value)]
    # `Any`, and the class: `isinstance` asks some libraries' objects.
    kind = type(value)
    if issubclass(kind, types.MethodType):
        parts = [value.__func__, value.__self__]
        new = [rebuilt(part, others) for part in parts]
        return value if _are_same(new, parts) else types.MethodType(*new)
    if issubclass(kind, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        func, *rest = new = [rebuilt(part, others) for part in parts]
        if _are_same(new, parts):
            return value
        n = len(value.args)
        keywords = dict(zip(value.keywords, rest[n:], strict=True))
        return kind(func, *rest[:n], **keywords)
    if issubclass(kind, tuple):
        new = [rebuilt(part, others) for part in value]
        if _are_same(new, value):
            return value
        return kind(*new) if hasattr(kind, "_fields") else kind(new)
    if issubclass(kind, (list, dict, type, *_CALLABLE)) or _trees.is_whole(value):
        return value
    if is_container(value):
        children, structure = one_level(value)
        parts = [child for _, child in children]
        new = [rebuilt(part, others) for part in parts]
        return value if _are_same(new, parts) else structure.unflatten(new)
    return value


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return all(a is b for a, b in zip(some, others, strict=True))
