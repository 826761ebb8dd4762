"""Names of types that a type checker cannot say more about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""A tree of tuples, lists, dicts and other nodes that JAX knows, or a leaf alone."""

Leaf: TypeAlias = Any
"""A leaf of a pytree: an array, a number, a string, or whatever object a user has."""

Value: TypeAlias = Any
"""An array, a number, nested lists of numbers, a variable: all `jnp.asarray` takes."""

Index: TypeAlias = Any
"""An index of an array, as in `array[index]`."""

Function: TypeAlias = Callable[..., Any]
"""A function of the user's, of whose arguments and results nothing is known."""
