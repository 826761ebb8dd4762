"""Names for the types of what users give, of which nothing is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Leaf: TypeAlias = Any
"""A leaf of a pytree: an array, a number, or whatever else a user puts there."""

Function: TypeAlias = Callable[..., Any]
"""A function of the user's, of whose arguments and results nothing is known."""
