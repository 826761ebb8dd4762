"""The arrays of a tree and where each lies: `placed_arrays`."""

from __future__ import annotations

import jax
import numpy as np
from jax.tree_util import GetAttrKey, KeyPath

from jaxstrategy.text._array_types import array_type
from jaxstrategy.values import _arrays, _per_replica
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._trees import is_whole
from jaxstrategy.values._types import Leaf, PyTree
from jaxstrategy.variables._cell import Cell
from jaxstrategy.variables._variable import Variable
from jaxstrategy.visualization._placed_array import (
    PlacedArray,
    is_placed_type,
    placed_array,
)

_HOST = "in the memory of the host"


def placed_arrays(tree: PyTree) -> list[PlacedArray]:
    """All arrays in `tree`, in its order; an array that is there twice once."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_whole)
    once = {id(leaf): (path, leaf) for path, leaf in reversed(leaves)}
    in_order = reversed(once.values())
    return [_of_leaf(_path_text(path), leaf) for path, leaf in in_order]


def _path_text(path: KeyPath) -> str:
    # Flax NNX has its arrays in objects, whose only part is called `value`.
    if len(path) > 1 and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _of_leaf(path: str, leaf: Leaf) -> PlacedArray:
    if isinstance(leaf, Variable):
        return _of_variable(path, leaf)
    if isinstance(leaf, PerReplica):
        return _of_array(path, _per_replica.contents(leaf), has_versions=True)
    return _of_array(path, leaf)


def _of_variable(path: str, variable: Variable) -> PlacedArray:
    path = path or variable.name
    cell = variable.cell
    if not isinstance(cell, Cell):
        kind = array_type(variable.dtype.name, variable.shape)
        return PlacedArray(path, kind, elsewhere=variable.kept)
    # Of the type: who reads the array makes the next step copy it.
    held = jax.ShapeDtypeStruct(cell.shape, cell.dtype)
    has_versions = len(cell.shape) > len(variable.shape)
    return placed_array(path, held, variable.sharding, has_versions)


def _of_array(path: str, leaf: Leaf, has_versions: bool = False) -> PlacedArray:
    if is_placed_type(leaf):
        return placed_array(path, leaf, leaf.sharding, has_versions)
    if not isinstance(leaf, jax.Array):
        return PlacedArray(path, _type_of(leaf, has_versions), elsewhere=_where(leaf))
    if _arrays.is_deleted(leaf):
        kind = _type_of(leaf, has_versions)
        return PlacedArray(path, kind, elsewhere="nowhere: donated to an earlier call")
    return placed_array(path, leaf, leaf.sharding, has_versions)


def _type_of(leaf: Leaf, has_versions: bool) -> str:
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    shape = leaf.shape[int(has_versions) :]
    return array_type(leaf.dtype, shape)


def _where(leaf: Leaf) -> str:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "nowhere yet: a type without a sharding"
    return _HOST if isinstance(leaf, (np.ndarray, np.generic)) else "a Python object"
