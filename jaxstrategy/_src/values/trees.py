"""Pytrees of values: leaves, objects of Flax, sharding annotations."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard

import jax
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath

from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.per_replica import Handle, PerReplica


def is_whole(value: object) -> bool:
    """Whether `value` is a `PerReplica` or a variable, which is treated as a leaf."""
    return _is_whole_kind(type(value))


# `isinstance` with abstract classes takes a third of a call's time where trees are
# small.
@functools.lru_cache(1024)
def _is_whole_kind(kind: type) -> bool:
    return issubclass(kind, (PerReplica, Handle))


def is_object(node: object) -> bool:
    """Whether `node` is an object of Flax NNX, changed in place and copied by JAX.

    Call `object_kinds` before.
    """
    # By type: `isinstance` asks some libraries' objects, which then load a library.
    return issubclass(type(node), _object_kinds)


_object_kinds: tuple[type, ...] = ()


def object_kinds() -> tuple[type, ...]:
    """The classes of objects of Flax NNX; none while it is not imported."""
    global _object_kinds
    if not _object_kinds and (nnx := sys.modules.get("flax.nnx")) is not None:
        _object_kinds = (nnx.Pytree,)
    return _object_kinds


def map_leaves(function: Callable[[Leaf], Leaf], tree: PyTree) -> PyTree:
    """`jax.tree.map` that gives `function` each `PerReplica` and variable whole."""
    return jax.tree.map(function, tree, is_leaf=is_whole)


class FlaxVariable(Protocol):
    """The methods of `nnx.Variable` used here; Flax is optional, and not imported."""

    @property
    def ref(self) -> bool: ...

    def get_raw_value(self) -> Leaf: ...

    def set_raw_value(self, value: Leaf) -> None: ...

    def get_metadata(self) -> Mapping[str, object]: ...

    def replace(self, value: Leaf) -> FlaxVariable: ...


def is_nnx_node(node: object) -> bool:
    """Whether `node` is an object or a variable, which a step may change in place."""
    return bool(object_kinds()) and (is_object(node) or is_variable(node))


def is_variable(node: object) -> TypeGuard[FlaxVariable]:
    return _is_variable_class(type(node))


@functools.lru_cache(maxsize=1024)
def _is_variable_class(kind: type) -> bool:
    # Flax's own `isinstance` takes ten times as long.
    return issubclass(kind, sys.modules["flax.nnx"].Variable)


def map_around_objects(function: Callable[[Leaf], Leaf], tree: PyTree) -> PyTree:
    """`map_leaves` that does not copy objects that are changed in place."""
    object_kinds()
    return jax.tree.map(
        lambda leaf: leaf if is_object(leaf) else function(leaf),
        tree,
        is_leaf=lambda node: is_whole(node) or is_object(node),
    )


def annotated_leaves(tree: PyTree) -> Iterator[tuple[KeyPath, Leaf, object]]:
    """The path, the leaf and Flax's spec, or None, of each leaf of `tree`.

    Logical names are translated by the rules that are set or that the annotation has.
    """

    def is_end(node: object) -> bool:
        is_annotated = _is_box(node) or _is_variable(node)
        return is_annotated or per_replica.is_per_replica(node)

    for path, node in jax.tree.leaves_with_path(tree, is_leaf=is_end):
        if _is_box(node):
            spec = _spec_of_box(node)
        elif _is_variable(node):
            spec = _spec_of_variable(node)
        else:
            yield path, node, None
            continue
        for inner, leaf in jax.tree.leaves_with_path(node):
            yield (*path, *inner), leaf, spec


def _is_box(node: object) -> bool:
    """Whether `node` is an annotated array of linen."""
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
    sharding = metadata.get("out_sharding")
    if not sharding:
        return None
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    nnx = sys.modules["flax.nnx"]
    return nnx.get_partition_spec([variable])[0].get_raw_value()


def without_eager_sharding() -> contextlib.AbstractContextManager[object]:
    """Lets Flax NNX make annotated variables without a mesh.

    Otherwise it raises (Flax 0.12), or places each array after it was made whole.
    """
    nnx = sys.modules.get("flax.nnx")
    return contextlib.nullcontext() if nnx is None else nnx.use_eager_sharding(False)
