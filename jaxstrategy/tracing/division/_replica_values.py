"""The values of one replica while its part of a divided step is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, final

import jax
from jax import lax
from jax.extend.core import Literal

from jaxstrategy.replicas._inner_placement import WHOLE, InnerSpec, of_versions
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.tracing._jaxpr_types import Atom, Var
from jaxstrategy.tracing._on_own_devices import on_each_device
from jaxstrategy.values._types import Function, Leaf


@final
class PartCollectives:
    """The gathers and scatters of arrays of which every replica has a part.

    Args:
      replicas: those of the step.
      inner: how the devices of a replica divide arrays, those that they do divide.

    Attributes:
      axes: along which replicas have different parts.
    """

    def __init__(self, replicas: Replicas, inner: Mapping[Var, InnerSpec]) -> None:
        self.axes = replicas.part_axes
        self._replicas = replicas
        self._inner = inner

    def gathered(
        self, part: jax.Array, dimension: int, var: Var, in_turn: bool = False
    ) -> jax.Array:
        """All of an array of which every replica has a part.

        Shapes: `[..., n, ...]` -> `[..., replicas * n, ...]`.

        Args:
          part: this replica's.
          dimension: along which the array is divided.
          var: the array.
          in_turn: whether it is what one turn of a loop has of that.
        """

        def all_parts(part: jax.Array) -> jax.Array:
            return lax.all_gather(part, self.axes, axis=dimension, tiled=True)

        return self._on_devices(all_parts, var, in_turn)(part)

    def scattered(
        self, array: jax.Array, dimension: int, var: Var, in_turn: bool = False
    ) -> jax.Array:
        """This replica's part of the sum of all replicas' arrays.

        Shapes: `[..., replicas * n, ...]` -> `[..., n, ...]`.

        Args:
          array: this replica's.
          dimension: along which the sum is divided.
          var: the sum.
          in_turn: whether it is what one turn of a loop has of that.
        """

        def own_part(array: jax.Array) -> jax.Array:
            return lax.psum_scatter(
                self.of_one_device(array),
                self.axes,
                scatter_dimension=dimension,
                tiled=True,
            )

        return self._on_devices(own_part, var, in_turn)(array)

    def total(self, array: jax.Array) -> jax.Array:
        """The sum of all replicas' arrays."""
        return lax.psum(array, self._replicas.collective_axes)

    def of_one_device(self, array: jax.Array) -> jax.Array:
        """The sum of the arrays of those replicas that share a device."""
        shared = self._replicas.sharing_axes
        return lax.psum(array, shared) if shared else array

    def _on_devices(self, function: Function, var: Var, in_turn: bool) -> Function:
        """`function` on each device's part of what the replica has.

        XLA would make what it gathers or scatters over the replicas whole on each
        device before (JAX 0.10 and 0.12).
        """
        inner = self._inner.get(var, WHOLE)
        inner = of_versions(inner) if in_turn else inner
        return (
            on_each_device(function, inner, self._replicas) if any(inner) else function
        )


@final
class ReplicaValues:
    """What one replica has: whole values, and its parts of others.

    Args:
      whole: the values that it has all of.
      parts: those of which it has a part.
      dimensions: the dimension along which each of these is divided.
      collectives: gather and scatter them.

    Attributes:
      parts: as given, with those that come to it.
      collectives: as given.
    """

    def __init__(
        self,
        whole: dict[Var, Leaf],
        parts: dict[Var, Leaf],
        dimensions: Mapping[Var, int],
        collectives: PartCollectives,
    ) -> None:
        self._whole = whole
        self.parts = parts
        self._dimensions = dimensions
        self.collectives = collectives

    def whole(self, atom: Atom) -> Leaf:
        """All of a value; of one that is divided it is gathered, once."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self._whole:
            dimension = self._dimensions[atom]
            self._whole[atom] = self.collectives.gathered(
                self.parts[atom], dimension, atom
            )
        return self._whole[atom]

    def keep(self, variables: Sequence[Var], values: Sequence[Leaf]) -> None:
        """Takes note of whole values."""
        self._whole.update(zip(variables, values, strict=True))


Evaluation: TypeAlias = Callable[[ReplicaValues], None]
"""Reads values, and keeps others."""
