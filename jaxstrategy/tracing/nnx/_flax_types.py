"""Flax's types, as far as type checkers need them where Flax is not installed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol, TypeAlias

from jaxstrategy.values._types import Leaf

NodePath: TypeAlias = tuple[Hashable, ...]
"""An object's index in a list of objects, then the names that lead to a part of it."""


class FlaxVariable(Protocol):
    """The methods of `nnx.Variable` that this folder calls.

    The class itself cannot be named: Flax is optional, and not imported from here.
    """

    @property
    def ref(self) -> bool:
        """Whether it holds a `jax.Ref`."""
        ...

    def get_raw_value(self) -> Leaf:
        """What it holds."""
        ...

    def set_raw_value(self, value: Leaf) -> None:
        """Lets it hold another value."""
        ...

    def get_metadata(self) -> Mapping[str, object]:
        """What Flax is told to do with it."""
        ...

    def replace(self, value: Leaf) -> FlaxVariable:
        """One like it that holds another value."""
        ...
