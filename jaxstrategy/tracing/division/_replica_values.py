"""The values of one replica while its part of a divided step is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, final

import jax
from jax import lax
from jax.extend.core import Literal

from jaxstrategy.tracing._jaxpr_types import Atom, Var
from jaxstrategy.values._types import Leaf

Axes: TypeAlias = tuple[str, ...]


@final
class ReplicaValues:
    """What one replica has: whole values, and its parts of others.

    Args:
      whole: the values that it has all of.
      parts: those of which it has a part.
      dimensions: the dimension along which each of these is divided.
      axes: of the replicas.

    Attributes:
      parts: as given, with those that come to it.
      axes: as given.
    """

    def __init__(
        self,
        whole: dict[Var, Leaf],
        parts: dict[Var, Leaf],
        dimensions: Mapping[Var, int],
        axes: Axes,
    ) -> None:
        self._whole = whole
        self.parts = parts
        self._dimensions = dimensions
        self.axes = axes

    def whole(self, atom: Atom) -> Leaf:
        """All of a value; of one that is divided it is gathered, once."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self._whole:
            dimension = self._dimensions[atom]
            self._whole[atom] = gathered(self.parts[atom], dimension, self.axes)
        return self._whole[atom]

    def keep(self, variables: Sequence[Var], values: Sequence[Leaf]) -> None:
        """Takes note of whole values."""
        self._whole.update(zip(variables, values, strict=True))


Evaluation: TypeAlias = Callable[[ReplicaValues], None]
"""Reads values, and keeps others."""


def gathered(part: jax.Array, dimension: int, axes: Axes) -> jax.Array:
    """All of an array of which every replica has a part.

    Shapes: `[..., n, ...]` -> `[..., replicas * n, ...]`.
    """
    return lax.all_gather(part, axes, axis=dimension, tiled=True)


def scattered(array: jax.Array, dimension: int, axes: Axes) -> jax.Array:
    """This replica's part of the sum of all replicas' arrays.

    Shapes: `[..., replicas * n, ...]` -> `[..., n, ...]`.
    """
    return lax.psum_scatter(array, axes, scatter_dimension=dimension, tiled=True)
