"""Pytrees whose nodes are not all looked into."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import jax

from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import Leaf, PyTree


def is_whole(value: object) -> bool:
    """Whether `value` is looked at as a whole, although it is a pytree."""
    return _is_whole_kind(type(value))


# `isinstance` with abstract classes takes a third of a call's time where trees are
# small.
@functools.lru_cache(1024)
def _is_whole_kind(kind: type) -> bool:
    return issubclass(kind, (PerReplica, Handle))


def is_object(node: object) -> bool:
    """Whether `node` is an object that is changed in place: of Flax NNX.

    A module, an optimizer, a metric. JAX takes it for a pytree, and copies it. Not to
    be asked before `object_kinds`.
    """
    # By type: `isinstance` asks some libraries' objects, which then load a library.
    return issubclass(type(node), _object_kinds)


_object_kinds: tuple[type, ...] = ()


def object_kinds() -> tuple[type, ...]:
    """The classes of such objects; none as long as Flax NNX is not imported."""
    global _object_kinds
    if not _object_kinds and (nnx := sys.modules.get("flax.nnx")) is not None:
        _object_kinds = (nnx.Pytree,)
    return _object_kinds


def map_leaves(function: Callable[[Leaf], Leaf], tree: PyTree) -> PyTree:
    """`jax.tree.map` that gives `function` each `PerReplica` and variable whole."""
    return jax.tree.map(function, tree, is_leaf=is_whole)


def map_around_objects(function: Callable[[Leaf], Leaf], tree: PyTree) -> PyTree:
    """`map_leaves` that keeps objects that are changed in place, uncopied."""
    object_kinds()
    return jax.tree.map(
        lambda leaf: leaf if is_object(leaf) else function(leaf),
        tree,
        is_leaf=lambda node: is_whole(node) or is_object(node),
    )
