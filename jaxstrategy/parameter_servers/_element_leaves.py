"""Elements of datasets as programs take them: `leaves_of`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from jaxstrategy.parameter_servers._shipped_program import ElementType
from jaxstrategy.replicas import _overflow
from jaxstrategy.text._shown import shown
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Leaf, PyTree, TreeStructure


class ElementLeaf(NamedTuple):
    """One array of an element.

    Attributes:
      array: of the host, or of the worker's devices.
      is_split: whether it has one version for each replica.
      is_mask: whether it says which rows are real of the leaf before.
    """

    array: np.ndarray | jax.Array
    is_split: bool = False
    is_mask: bool = False


def is_leaf(node: object) -> bool:
    """Whether a node of an element is looked at as a whole."""
    return isinstance(node, PerReplica)


def structure_of(element: PyTree) -> TreeStructure:
    """The structure of an element, with `PerReplica`s as leaves."""
    return jax.tree.structure(element, is_leaf=is_leaf)


def leaves_of(element: PyTree) -> tuple[list[np.ndarray | jax.Array], ElementType]:
    """The leaves of an element, and its type."""
    nodes, structure = jax.tree.flatten(element, is_leaf=is_leaf)
    leaves = [leaf for node in nodes for leaf in _leaves(node)]
    types = tuple((tuple(x.array.shape), str(x.array.dtype)) for x in leaves)
    split = tuple(x.is_split for x in leaves)
    masks = tuple(x.is_mask for x in leaves)
    return [x.array for x in leaves], ElementType(str(structure), types, split, masks)


def _leaves(node: Leaf) -> Iterator[ElementLeaf]:
    if not isinstance(node, PerReplica):
        yield ElementLeaf(_array(node))
        return
    yield ElementLeaf(_per_replica.contents(node), is_split=True)
    # A program is traced for full batches, and another one for those that are not.
    if node.mask is not None and not np.all(mask := np.asarray(node.mask)):
        yield ElementLeaf(mask, is_mask=True)


def _array(leaf: Leaf) -> np.ndarray | jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"An element of a dataset holds {shown(leaf)}, which is not an array of "
            "numbers. Leave it out, or encode it as numbers."
        )
    _overflow.check_held(array)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
