"""A pytree as its arrays and the rest of it: `ArrayTree`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxstrategy.replicas import _overflow
from jaxstrategy.text._array_types import array_type
from jaxstrategy.values import _arrays, _trees
from jaxstrategy.values._types import Leaf, PyTree


class ArrayTree:
    """A pytree as its arrays and the rest of it.

    Args:
      tree: any.
      with_numbers: whether Python's numbers count as arrays.

    Attributes:
      paths: of all its leaves.
      leaves: they.
      structure: how they are put together.
    """

    def __init__(self, tree: PyTree, with_numbers: bool = True) -> None:
        found, self.structure = jax.tree.flatten_with_path(
            tree, is_leaf=_trees.is_whole
        )
        self.paths = [path for path, _ in found]
        self.leaves = [
            _overflow.array_of(leaf) if with_numbers and is_number(leaf) else leaf
            for _, leaf in found
        ]
        self._are_arrays = list(map(_arrays.is_array, self.leaves))

    @property
    def arrays(self) -> list[jax.Array]:
        """The arrays among the leaves."""
        leaves = zip(self.leaves, self._are_arrays, strict=True)
        return [jnp.asarray(leaf) for leaf, is_array in leaves if is_array]

    def take(self) -> list[jax.Array]:
        """The arrays, which are not kept: those of a trace must not outlive it."""
        arrays = self.arrays
        leaves = zip(self.leaves, self._are_arrays, strict=True)
        self.leaves = [None if is_array else leaf for leaf, is_array in leaves]
        return arrays

    def with_arrays(self, arrays: Sequence[jax.Array]) -> PyTree:
        """The pytree with other arrays."""
        following = iter(arrays)
        leaves = zip(self.leaves, self._are_arrays, strict=True)
        return self.structure.unflatten(
            next(following) if is_array else leaf for leaf, is_array in leaves
        )


def is_number(leaf: Leaf) -> bool:
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)


def are_alike(a: Leaf, b: Leaf, but_rows: bool = False) -> bool:
    """Whether `a` is as `b` is; perhaps but for the number of rows."""
    if _arrays.is_array(a) and _arrays.is_array(b):
        if but_rows and a.ndim and b.ndim:
            return (a.shape[1:], a.dtype) == (b.shape[1:], b.dtype)
        return (a.shape, a.dtype) == (b.shape, b.dtype)
    # Of one type, because 1, 1.0 and True are equal.
    return a is b or (type(a) is type(b) and bool(a == b))


def told(value: object) -> str:
    if _arrays.is_array(value):
        return array_type(value.dtype, value.shape)
    is_leaf = jax.tree_util.all_leaves([value])
    return repr(value) if is_leaf else f"a {type(value).__name__}"
