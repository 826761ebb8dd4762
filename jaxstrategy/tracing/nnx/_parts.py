"""Arrays in the place of the caller's objects, on their way through a compiled step."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import jax

from jaxstrategy.tracing.nnx._flax_types import NodePath
from jaxstrategy.values import _trees
from jaxstrategy.values._types import Leaf


# By identity: JAX hashes it within a structure, and a list as `value` has no hash.
@dataclasses.dataclass(frozen=True, eq=False)
class AttributeChange:
    """A change that a step makes to an object, besides those of its arrays.

    Attributes:
      path: of the object, from the list of all.
      name: of its attribute.
      value: what that is now; `GONE` if there is none any more.
    """

    path: NodePath
    name: str
    value: object


GONE = object()

# Of `Parts`, what JAX compares and no program is given.
_Static: TypeAlias = "tuple[tuple[str, ...], tuple[AttributeChange, ...]]"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The arrays that stand for an object.

    Attributes:
      arrays: they, or what else its variables hold.
      names: how messages call them.
      changes: what a step changes besides, of all objects.
    """

    arrays: Sequence[Leaf]
    names: tuple[str, ...]
    changes: tuple[AttributeChange, ...] = ()

    def tree_flatten(self) -> tuple[Sequence[Leaf], _Static]:
        """For JAX."""
        return self.arrays, (self.names, self.changes)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Hashable, Leaf]], _Static]:
        """For JAX."""
        keys = map(jax.tree_util.GetAttrKey, self.names)
        return list(zip(keys, self.arrays, strict=True)), (self.names, self.changes)

    @classmethod
    def tree_unflatten(cls, aux: _Static, arrays: Sequence[Leaf]) -> Parts:
        """For JAX."""
        return cls(arrays, *aux)


# Static: a compiled step returns arrays alone, and marks in the structure around them.
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Same:
    """In what a step returns: one of the caller's objects, or a part of one."""

    path: NodePath


def apply(
    changes: Sequence[AttributeChange], by_path: Mapping[NodePath, object]
) -> None:
    for change in changes:
        if change.value is GONE:
            delattr(by_path[change.path], change.name)
        else:
            setattr(by_path[change.path], change.name, change.value)


def dotted(path: Sequence[object]) -> str:
    """`layers[0].kernel`, without the object's own place."""
    text = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path[1:])
    return text.removeprefix(".") or "value"


def is_parts(node: object) -> bool:
    """Whether `node` stands for an object."""
    return isinstance(node, Parts)


def is_whole_or_parts(node: object) -> bool:
    """Whether `node` stands for an object, or is looked at as a whole."""
    return is_parts(node) or _trees.is_whole(node)
