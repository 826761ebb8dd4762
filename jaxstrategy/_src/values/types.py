"""Names of types that a type checker cannot say more about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

PyTree: TypeAlias = Any
"""A tree of tuples, lists, dicts and other nodes that JAX knows, or a leaf alone."""

TreeT = TypeVar("TreeT")
"""What comes back as the same kind of tree, with arrays of JAX as its leaves."""

Number: TypeAlias = complex | np.ndarray | np.generic
"""A leaf that is no array of JAX, and comes back as one."""

Leaf: TypeAlias = Any
"""A leaf of a pytree: an array, a number, a string, or whatever object a user has."""

Value: TypeAlias = Any
"""An array, a number, nested lists of numbers, a variable: all `jnp.asarray` takes."""

Index: TypeAlias = Any
"""An index of an array, as in `array[index]`."""

Function: TypeAlias = Callable[..., Any]
"""A function of the user's, of whose arguments and results nothing is known."""


class TreeStructure(Protocol):
    """The structure of a pytree; to type checkers JAX's `PyTreeDef` is no class."""

    @property
    def num_leaves(self) -> int:
        """The number of its leaves."""
        ...

    @property
    def num_nodes(self) -> int:
        """The number of its leaves and inner nodes."""
        ...

    def node_data(self) -> tuple[type, object] | None:
        """The class of the outermost node and what it keeps; None of a leaf."""
        ...

    def children(self) -> Sequence[TreeStructure]:
        """The structures of what the outermost node holds."""
        ...

    def unflatten(self, leaves: Iterable[Leaf], /) -> PyTree:
        """A pytree of this structure."""
        ...

    def flatten_up_to(self, tree: PyTree, /) -> list[PyTree]:
        """What `tree` holds in the places of the leaves."""
        ...
