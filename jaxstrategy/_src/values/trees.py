"""Pytrees of values: leaves, objects of Flax, sharding annotations."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath

from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.per_replica import Handle, PerReplica


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


def annotated_leaves(tree: PyTree) -> Iterator[tuple[KeyPath, Leaf, object]]:
    """The paths of all leaves of `tree`, the leaves, and what Flax says of each.

    That is a spec, with logical names already translated by the rules that
    are set or that the annotation has; None where there is no annotation.
    """

    def is_end(node: object) -> bool:
        return per_replica.is_per_replica(node) or _is_annotated(node)

    for path, node in jax.tree.leaves_with_path(tree, is_leaf=is_end):
        if not _is_annotated(node):
            yield path, node, None
            continue
        spec = _spec_of_box(node) if _is_box(node) else _spec_of_variable(node)
        for inner, leaf in jax.tree.leaves_with_path(node):
            yield (*path, *inner), leaf, spec


def _is_annotated(node: object) -> bool:
    return _is_box(node) or _is_variable(node)


def _is_box(node: object) -> bool:
    """Whether `node` is an array of linen with the names of its axes."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(node, linen.Partitioned)


def _is_variable(node: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)


def _spec_of_box(box: Any) -> object:
    linen = sys.modules["flax.linen"]
    spec = box.get_partition_spec()
    if not isinstance(box, linen.LogicallyPartitioned):
        return spec
    return linen.logical_to_mesh_axes(tuple(spec), rules=box.rules)


def _spec_of_variable(variable: Any) -> object:
    metadata: Mapping[str, Any] = variable.get_metadata()
    named = metadata.get("out_sharding")
    if not named:
        return None
    if isinstance(named, NamedSharding):
        return named.spec
    nnx = sys.modules["flax.nnx"]
    return nnx.get_partition_spec([variable])[0].get_raw_value()


def without_eager_sharding() -> contextlib.AbstractContextManager[object]:
    """A `with` block in which Flax NNX makes annotated variables without any mesh.

    Otherwise it refuses to (Flax 0.12), or places each array after it was made whole.
    """
    nnx = sys.modules.get("flax.nnx")
    return contextlib.nullcontext() if nnx is None else nnx.use_eager_sharding(False)
